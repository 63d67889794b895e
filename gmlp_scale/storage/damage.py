"""What libraries raise where a file is damaged, as an error of its reader. The readers of corpora, images and tasks'
records share it."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gmlp_scale.errors import InputError, UserError


@contextmanager
def damage_as(refuse: Callable[[str], InputError]) -> Iterator[None]:
    """Raises what `refuse` makes of the message where a library, in the body, finds the file that it reads damaged."""
    import pyarrow
    from zstandard import ZstdError

    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, ValueError, EOFError, StopIteration, zlib.error, ZstdError, OSError) as error:
        if isinstance(error, OSError) and (error.errno or type(error) not in (OSError, gzip.BadGzipFile)):
            raise  # from the disk or the store; for a damaged page pyarrow raises an OSError without a number
        raise refuse(" ".join(str(error).split()) or "it is empty or cut short") from error
