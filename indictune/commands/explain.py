"""`indictune explain`: print what an error code means, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from indictune.config.command_line import with_flag
from indictune.config.shared_arguments import Checked, flag
from indictune.errors import UserError, catalogue, in_capitals


@dataclass
class ExplainFlags(Checked):
    """Which error code is explained."""

    code: str = flag("", "The code in brackets at the end of a message. May be given as a bare first word.")


def run_explain(flags: Mapping[str, list[str]]) -> int:
    """Print the entry of a code in the catalogue of errors."""
    code = " ".join(with_flag(flags, "code").get("code", [])).strip("[]")
    if not code:
        raise UserError("argument-missing", "--code", usage="indictune explain CODE")
    if (entry := catalogue().get(code)) is None:
        near = difflib.get_close_matches(code, catalogue(), n=3) or [each for each in catalogue() if code in each][:3]
        hint = (
            f"Did you mean {' or '.join(near)}?" if near else "The page Errors of the documentation lists all codes."
        )
        raise UserError("no-such-name", "--code", code, hint, kind="error code", known="")
    way_out = in_capitals(entry["way_out"])
    print(f"{code}\n\nThe message:\n  {in_capitals(entry['problem'])}\n\nThe way out:\n  {way_out}\n")
    print("FLAG is the flag, file or recipe key at fault. VALUE is what it holds. A message fills in other capitals.")
    return 0
