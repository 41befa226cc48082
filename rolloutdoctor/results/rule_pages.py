"""Where the page of a rule is."""

SITE = ""
"""Address of the published docs with a slash at its end; empty while there is none: the command line has every page."""


def page_of(code: str) -> str:
    """Return the address of a rule's page, or the command that prints it.

    >>> page_of("RDA001")
    'rolloutdoctor explain RDA001'
    """
    return f"{SITE}rules/{code}/" if SITE else f"rolloutdoctor explain {code}"
