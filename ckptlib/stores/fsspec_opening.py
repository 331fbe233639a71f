"""Opens the filesystem that fsspec has for a URL. Refuses those that would keep what they have listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec

from ckptlib.stores.fsspec_errors import ABSENT
from ckptlib.stores.gcs_answers import DEFAULTS, refuse_pages
from ckptlib.stores.secrets import Secrets

_EXTRAS = {"gs": "gcs", "gcs": "gcs", **dict.fromkeys(("az", "abfs", "abfss"), "azure")}  # by scheme


def open_filesystem(url: str, options: Mapping[str, object]) -> tuple[Any, str]:
    """Returns a filesystem of its own, and the path in it. Raises ValueError for one that cannot be used."""
    scheme = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url, **{**DEFAULTS.get(scheme, {}), **options, "skip_instance_cache": True})
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        if extra is None:
            raise
        raise ImportError(f"{scheme}:// needs a package: pip install 'ckptlib[{extra}]' ({error})") from error
    except (KeyError, TypeError, AttributeError, *ABSENT) as error:  # gcsfs reads a file of other credentials
        told = Secrets(url, options).hide(f"{type(error).__name__}: {error}")
        raise ValueError(f"the filesystem for {scheme}:// lacks an option, or what one names: {told}") from None
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise
        raise ValueError(
            f"fsspec has no filesystem for {scheme}://; expected a path, or a URL such as s3://bucket/run7, "
            "gs://bucket/run7 or az://container/run7"
        ) from None
    if not hasattr(fs.dircache, "use_listings_cache"):  # Hugging Face's has a dict of its own
        raise ValueError(
            f"the filesystem for {scheme}://, {type(fs).__name__}, keeps what it has listed, which cannot be switched "
            "off; ckptlib needs fresh listings. Copy the files to a path or a bucket, and give that"
        )
    if scheme in DEFAULTS:
        refuse_pages(fs)
    fs.dircache.use_listings_cache = False  # the argument of that name is refused by some filesystems (SFTP)
    return fs, str(root).rstrip("/")
