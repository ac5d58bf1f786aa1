"""Answer a text with a trained language model: `FOLDER TEXT`."""

import sys

from indictune.prediction.chat_model import open_chat_model

if __name__ == "__main__":
    folder, text = sys.argv[1:]
    print(open_chat_model(folder, max_new_tokens=8).answer(text, lambda _: None))
