"""Whether the token may write to the repository of the Hub. Nothing shows the token."""

from __future__ import annotations

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from indictune.credentials import without_tokens
from indictune.distributed.doctor.lines import Line

CHECK = "Hub"
_LATER, _SERVER_ERROR = (408, 429), 500  # the token is not at fault
_AGAIN = "The push at the end needs the network of rank 0. `indictune train` of the finished run pushes again."
_CURE = "Make a token that may write at https://huggingface.co/settings/tokens, and set HF_TOKEN."


def hub_line(repository: str | None) -> Line:
    """Whether a push can succeed.

    Args:
        repository: where the run pushes to, with or without a namespace; None if it does not push.
    """
    if repository is None:
        return Line(CHECK, "ok", "not asked: the run does not push")
    if constants.HF_HUB_OFFLINE:
        found = f"not asked about {repository}: HF_HUB_OFFLINE is set"
        return Line(
            CHECK, "warn", found, "The push at the end needs the network: unset it, or leave out --push_to_hub."
        )
    if get_token() is None:
        return Line(CHECK, "fail", "there is no token", "Set HF_TOKEN, or run `hf auth login` once.")
    try:
        return _asked(repository)
    except HfHubHTTPError as error:
        reason = without_tokens(str(error).partition("\n")[0])
        if error.response.status_code in _LATER or error.response.status_code >= _SERVER_ERROR:
            return Line(CHECK, "warn", f"does not answer: {reason}", _AGAIN)
        return Line(CHECK, "fail", f"refused access to {repository}: {reason}", _CURE)
    except Exception as error:  # no network: what the client raises depends on its version
        return Line(CHECK, "warn", f"does not answer ({type(error).__name__})", _AGAIN)


def _asked(repository: str) -> Line:
    """The answer of the Hub.

    Raises:
        HfHubHTTPError: it refused.
    """
    api = HfApi()
    user = api.whoami()
    name = repository if "/" in repository else f"{user['name']}/{repository}"
    try:
        api.auth_check(name, write=True)
    except RepositoryNotFoundError:  # the run makes it
        return _may_make(name, user)
    return Line(CHECK, "ok", f"{user['name']} may write to {name}")


def _may_make(name: str, user: dict[str, object]) -> Line:
    """Whether the token may make a repository in a namespace: the user's own, or that of an organisation."""
    auth = user.get("auth")
    token = auth.get("accessToken") if isinstance(auth, dict) else None
    role = token.get("role") if isinstance(token, dict) else None
    orgs = user.get("orgs")
    own = [str(user["name"]), *(str(each["name"]) for each in (orgs if isinstance(orgs, list) else []))]
    if role == "read" or name.partition("/")[0] not in own:
        why = "the token may only read" if role == "read" else f"the token belongs to {', '.join(own)}"
        return Line(CHECK, "fail", f"{name} does not exist, and cannot be made: {why}", _CURE)
    return Line(CHECK, "ok", f"{name} does not exist yet; the run makes it")
