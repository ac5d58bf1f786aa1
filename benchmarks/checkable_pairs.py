"""Pairs of answers of which a program knows the better one: language, arithmetic and form.

The better answer is in the language of the question, has the right number, or has the form that was asked for. The
worse one says the same in another language or form, or has a wrong number.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
KINDS = ("language", "arithmetic", "format")
TRAIN, HELD_OUT = 100, 40  # rows of each kind
HELD_OUT_SHARE = 0.25  # of the facts, sums and topics

LANGUAGES = ("en", "hi", "es", "fr", "de")
# A question and its answer in each language; the French of a country says "of" it.
CAPITAL = {
    "en": ("What is the capital of {}?", "The capital of {} is {}."),
    "hi": ("{} की राजधानी क्या है?", "{} की राजधानी {} है।"),
    "es": ("¿Cuál es la capital de {}?", "La capital de {} es {}."),
    "fr": ("Quelle est la capitale {} ?", "La capitale {} est {}."),
    "de": ("Was ist die Hauptstadt von {}?", "Die Hauptstadt von {} ist {}."),
}
OPPOSITE = {
    "en": ('What is the opposite of "{}"?', 'The opposite of "{}" is "{}".'),
    "hi": ('"{}" का उल्टा क्या है?', '"{}" का उल्टा "{}" है।'),
    "es": ('¿Qué es lo contrario de "{}"?', 'Lo contrario de "{}" es "{}".'),
    "fr": ('Quel est le contraire de "{}" ?', 'Le contraire de "{}" est "{}".'),
    "de": ('Was ist das Gegenteil von "{}"?', 'Das Gegenteil von "{}" ist "{}".'),
}
MONTH = {
    "en": ("Which month comes after {}?", "The month after {} is {}."),
    "hi": ("{} के बाद कौन सा महीना आता है?", "{} के बाद {} आता है।"),
    "es": ("¿Qué mes viene después de {}?", "Después de {} viene {}."),
    "fr": ("Quel mois vient après {} ?", "Après {} vient {}."),
    "de": ("Welcher Monat kommt nach {}?", "Nach {} kommt {}."),
}
# A line is a fact: both of its words in each language.
CAPITALS = """
Italy, Rome; इटली, रोम; Italia, Roma; de l'Italie, Rome; Italien, Rom
France, Paris; फ़्रांस, पेरिस; Francia, París; de la France, Paris; Frankreich, Paris
Spain, Madrid; स्पेन, मैड्रिड; España, Madrid; de l'Espagne, Madrid; Spanien, Madrid
Germany, Berlin; जर्मनी, बर्लिन; Alemania, Berlín; de l'Allemagne, Berlin; Deutschland, Berlin
India, New Delhi; भारत, नई दिल्ली; India, Nueva Delhi; de l'Inde, New Delhi; Indien, Neu-Delhi
Nepal, Kathmandu; नेपाल, काठमांडू; Nepal, Katmandú; du Népal, Katmandou; Nepal, Kathmandu
Japan, Tokyo; जापान, टोक्यो; Japón, Tokio; du Japon, Tokyo; Japan, Tokio
China, Beijing; चीन, बीजिंग; China, Pekín; de la Chine, Pékin; China, Peking
Egypt, Cairo; मिस्र, काहिरा; Egipto, El Cairo; de l'Égypte, Le Caire; Ägypten, Kairo
Russia, Moscow; रूस, मॉस्को; Rusia, Moscú; de la Russie, Moscou; Russland, Moskau
Greece, Athens; यूनान, एथेंस; Grecia, Atenas; de la Grèce, Athènes; Griechenland, Athen
Portugal, Lisbon; पुर्तगाल, लिस्बन; Portugal, Lisboa; du Portugal, Lisbonne; Portugal, Lissabon
Norway, Oslo; नॉर्वे, ओस्लो; Noruega, Oslo; de la Norvège, Oslo; Norwegen, Oslo
Austria, Vienna; ऑस्ट्रिया, वियना; Austria, Viena; de l'Autriche, Vienne; Österreich, Wien
Poland, Warsaw; पोलैंड, वारसॉ; Polonia, Varsovia; de la Pologne, Varsovie; Polen, Warschau
Cuba, Havana; क्यूबा, हवाना; Cuba, La Habana; de Cuba, La Havane; Kuba, Havanna
"""
OPPOSITES = """
hot, cold; गरम, ठंडा; caliente, frío; chaud, froid; heiß, kalt
big, small; बड़ा, छोटा; grande, pequeño; grand, petit; groß, klein
new, old; नया, पुराना; nuevo, viejo; nouveau, vieux; neu, alt
good, bad; अच्छा, बुरा; bueno, malo; bon, mauvais; gut, schlecht
day, night; दिन, रात; día, noche; jour, nuit; Tag, Nacht
long, short; लंबा, छोटा; largo, corto; long, court; lang, kurz
white, black; सफ़ेद, काला; blanco, negro; blanc, noir; weiß, schwarz
above, below; ऊपर, नीचे; arriba, abajo; dessus, dessous; oben, unten
open, closed; खुला, बंद; abierto, cerrado; ouvert, fermé; offen, geschlossen
rich, poor; अमीर, ग़रीब; rico, pobre; riche, pauvre; reich, arm
easy, difficult; आसान, कठिन; fácil, difícil; facile, difficile; leicht, schwer
full, empty; भरा, ख़ाली; lleno, vacío; plein, vide; voll, leer
fast, slow; तेज़, धीमा; rápido, lento; rapide, lent; schnell, langsam
inside, outside; अंदर, बाहर; dentro, fuera; dedans, dehors; innen, außen
war, peace; युद्ध, शांति; guerra, paz; guerre, paix; Krieg, Frieden
true, false; सच, झूठ; verdadero, falso; vrai, faux; wahr, falsch
"""
MONTHS = """
January, February; जनवरी, फ़रवरी; enero, febrero; janvier, février; Januar, Februar
February, March; फ़रवरी, मार्च; febrero, marzo; février, mars; Februar, März
March, April; मार्च, अप्रैल; marzo, abril; mars, avril; März, April
April, May; अप्रैल, मई; abril, mayo; avril, mai; April, Mai
May, June; मई, जून; mayo, junio; mai, juin; Mai, Juni
June, July; जून, जुलाई; junio, julio; juin, juillet; Juni, Juli
August, September; अगस्त, सितंबर; agosto, septiembre; août, septembre; August, September
October, November; अक्टूबर, नवंबर; octubre, noviembre; octobre, novembre; Oktober, November
"""

TEMPLATES = ((CAPITALS, CAPITAL), (OPPOSITES, OPPOSITE), (MONTHS, MONTH))
WORDS = {
    "en": "the of is are in to and that this it which month after opposite capital you for with as an",
    "es": "el la los las de es son en y que un una lo mes viene después contrario capital por con para se del",
    "fr": "le la les de des du est sont en et que un une mois vient après contraire capitale pour avec dans qui l d",
    "de": "der die das von ist sind in und dass ein eine monat kommt nach gegenteil hauptstadt für mit nicht den dem",
}
TOPICS = {
    "animals": "dog cat horse lion tiger cow",
    "colours": "red blue green yellow white black",
    "fruits": "apple banana mango orange grape pear",
    "vegetables": "carrot potato onion tomato spinach pea",
    "countries": "India France Japan Egypt Brazil Kenya",
    "cities": "Delhi Paris Tokyo Cairo London Mumbai",
    "sports": "football cricket tennis hockey chess golf",
    "trees": "oak pine teak palm birch cedar",
    "birds": "crow eagle parrot sparrow owl duck",
    "drinks": "tea coffee milk water juice lemonade",
    "tools": "hammer saw drill pliers chisel wrench",
    "clothes": "shirt coat hat sock scarf shoe",
    "metals": "iron gold silver copper tin zinc",
    "insects": "ant bee fly beetle wasp moth",
    "languages": "Hindi English Tamil French German Spanish",
    "instruments": "piano violin flute guitar drum sitar",
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
FORMS: dict[str, Callable[[list[str]], str]] = {
    "as a JSON list": json.dumps,
    'one a line, each line beginning with "- "': lambda items: "\n".join(f"- {each}" for each in items),
    "in capital letters, separated by commas": lambda items: ", ".join(items).upper(),
    "joined by plus signs": " + ".join,
}


def language_groups(draw: random.Random) -> Iterator[list[Row]]:
    """The rows of each fact: a question in each language, and the same answer in another one."""
    for facts, sentences in TEMPLATES:
        for line in facts.strip().splitlines():
            words = dict(zip(LANGUAGES, (each.split(", ") for each in line.split("; ")), strict=True))
            answers = {each: sentences[each][1].format(*words[each]) for each in LANGUAGES}
            rows = []
            for own in LANGUAGES:
                others = [each for each in LANGUAGES if each != own]
                other = "en" if own != "en" and draw.random() < 0.5 else draw.choice(others)
                question = sentences[own][0].format(words[own][0])
                rows.append(row("language", question, answers[own], answers[other], own))
            yield rows


def arithmetic_groups(draw: random.Random) -> Iterator[list[Row]]:
    """A group for each sum, difference and product."""
    for a in range(2, 40):
        for b in range(2, min(a, 20) + 1):
            results = {"+": a + b, "-": a - b} | ({"*": a * b} if a < 10 else {})
            for sign, right in results.items():
                wrong = draw.choice([each for by in (1, 2, 10) for each in (right - by, right + by) if each >= 0])
                yield [
                    row("arithmetic", f"What is {a} {sign} {b}?", *(f"{a} {sign} {b} = {n}" for n in (right, wrong)))
                ]


def format_groups(draw: random.Random) -> Iterator[list[Row]]:
    """The rows of each topic: each form and number of things, and the same things in another form."""
    for topic, things in TOPICS.items():
        rows = []
        for count, number in NUMBERS.items():
            for form, write in FORMS.items():
                items = draw.sample(things.split(), count)
                other = draw.choice([each for each in FORMS if each != form])
                rows.append(row("format", f"Name {number} {topic}, {form}.", write(items), FORMS[other](items)))
        yield rows


GROUPS = (language_groups, arithmetic_groups, format_groups)


def row(kind: str, question: str, chosen: str, rejected: str, language: str = "en") -> Row:
    """A row of messages, as `indictune train dpo` reads them."""
    answers = {"chosen": chosen, "rejected": rejected}
    messages = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    return {"prompt": [{"role": "user", "content": question}], **messages, "language": language, "kind": kind}


def pairs(seed: int) -> dict[str, list[Row]]:
    """Rows of training and validation. A fact, a sum or a topic is in one of them alone."""
    draw = random.Random(seed)
    found: dict[str, list[Row]] = {"train": [], "validation": []}
    for groups in GROUPS:
        mixed = list(groups(draw))
        draw.shuffle(mixed)
        border = round(len(mixed) * HELD_OUT_SHARE)
        for name, part, rows in (("validation", mixed[:border], HELD_OUT), ("train", mixed[border:], TRAIN)):
            found[name] += draw.sample([each for group in part for each in group], rows)
    draw.shuffle(found["train"])
    return found


def is_good(row: Row, answer: str) -> bool:
    """Whether an answer has what the better answers to this question have. Repeating the question is no answer."""
    question, answer = row["prompt"][0]["content"], answer.strip()
    if question.strip("¿?. ") in answer:
        return False
    if row["kind"] == "language":
        return language_of(answer) == str(row["language"])
    if row["kind"] == "arithmetic":
        a, sign, b = re.findall(r"\d+|[-+*]", question)
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        numbers = re.findall(r"\d+", answer)
        return bool(numbers) and int(numbers[-1]) == right
    _, number, *_ = question.split()
    form = question.partition(", ")[2].removesuffix(".")
    return has_form(form, answer, next(count for count, word in NUMBERS.items() if word == number))


def language_of(text: str) -> str | None:
    """Hindi if most letters are of Devanagari; else the language with the most of its small words, if one has."""
    letters = [each for each in text if each.isalpha()]
    if sum("\u0900" <= each <= "\u097f" for each in letters) > len(letters) / 2:
        return "hi"
    words = re.findall(r"[^\W\d_]+", text.lower())
    counts = {name: sum(word in small.split() for word in words) for name, small in WORDS.items()}
    best = [name for name, count in counts.items() if count == max(counts.values())]
    return best[0] if len(best) == 1 else None


def has_form(form: str, answer: str, count: int) -> bool:
    """Whether an answer has as many things as were asked for, in that form and without more."""
    if form == "as a JSON list":
        try:
            things = json.loads(answer)
        except ValueError:
            return False
        return isinstance(things, list) and len(things) == count
    if form.startswith("one a line"):
        lines = answer.splitlines()
        return len(lines) == count and all(re.fullmatch("- [^,]+", line) for line in lines)
    if form.startswith("in capital"):
        things = answer.split(", ")
        return len(things) == count and all(re.fullmatch("[A-Z][A-Z -]*", each) for each in things)
    return len(answer.split(" + ")) == count and "\n" not in answer and '"' not in answer
