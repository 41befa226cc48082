"""Whether there is anything to log in to Google's storage with, found out before its library waits for it."""

import http.client
import os
from pathlib import Path

# Google's documented search (https://google.aip.dev/auth/4110) ends at this address of its own machines.
_METADATA_SERVER = "169.254.169.254"
_SECONDS = 3.0


def has_credentials() -> bool:
    """Tell whether Google's library can find credentials: named, left by gcloud, or those of a machine of Google's.

    Without this question it looks for a machine's own ones again and again, for most of a minute.
    """
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return True
    override = os.environ.get("GOOGLE_GCLOUD_ADC_PATH_OVERRIDE")
    home = os.environ.get("APPDATA") if os.name == "nt" else os.environ.get("HOME")
    folder = Path(home or "") / ("gcloud" if os.name == "nt" else ".config/gcloud")
    if Path(override or folder / "application_default_credentials.json").exists():
        return True
    return _is_google(os.environ.get("GCE_METADATA_ROOT") or _METADATA_SERVER)


def _is_google(host: str) -> bool:
    """Other clouds have a server at this address, too; Google's says who it is."""
    connection = http.client.HTTPConnection(host, timeout=_SECONDS)
    try:
        connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
        return connection.getresponse().headers.get("Metadata-Flavor") == "Google"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
