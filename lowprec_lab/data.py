"""The text that the course trains on: where it comes from, its characters as tokens, and batches of them.

The text is, in this order: what `LOWPREC_DATA` names (a text file, or a folder that holds tinyshakespeare.txt); tiny
Shakespeare from the cache, or fetched into it once and compared with its checksum; else the source of Python's own
standard library, which is wherever Python is. Which of them it is, is always printed.

A token is a character. The tokens of a text lie in a file of the cache that is mapped into memory, one or two bytes
each: nothing is read before it is needed, and several processes share it.

Source of the text: Karpathy, char-rnn (2015); 40,000 lines of Shakespeare, cut 90 : 10 as in nanoGPT.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowprec_lab.files import WorkspaceError, write_whole

SHAKESPEARE = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SPLITS = ("train", "validation")
_TIMEOUT_S = 10.0
_EMBEDDED_BYTES = 2**21


class DataError(ValueError):
    """The text cannot be used; the sentence says why, and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"DataError: {self}"]


@dataclass(frozen=True)
class Text:
    """A text. origin: "LOWPREC_DATA", "cache", "download" or "embedded"; line: says in words where it is from."""

    characters: str
    name: str
    origin: str
    line: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.characters.encode()).hexdigest()


# --- where the text comes from ----------------------------------------------------------------------------------------


def find_text() -> Text:
    """The text to train on. Raises DataError when `LOWPREC_DATA` names something that cannot be read."""
    named = _named_file()
    if named is not None:
        return Text(_read(named), named.name, "LOWPREC_DATA", f"Training text: {named} (LOWPREC_DATA).")
    cached = cache_folder() / SHAKESPEARE
    if _is_shakespeare(cached):
        return Text(_read(cached), SHAKESPEARE, "cache", f"Training text: tiny Shakespeare, from {cached}.")
    reason = _download(cached)
    if not reason:
        line = f"Training text: tiny Shakespeare, fetched from {URL} into {cached}."
        return Text(_read(cached), SHAKESPEARE, "download", line)
    line = f"Training text: the source of Python's standard library. Tiny Shakespeare could not be fetched: {reason}."
    return Text(_python_source(), "Python's standard library", "embedded", line)


def local_text() -> Path | None:
    """The file that training would read without a network: what LOWPREC_DATA names, or the cache's; else None."""
    with contextlib.suppress(DataError):
        named = _named_file()
        if named is not None:
            return named
    cached = cache_folder() / SHAKESPEARE
    return cached if cached.is_file() else None


def cache_folder() -> Path:
    """Where the text and its tokens are kept: pooch's folder for this package; it may not exist yet."""
    try:
        import pooch
    except ImportError:  # a bare machine: the same place on Linux
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowprec_lab"
    return Path(pooch.os_cache("lowprec_lab"))


def _named_file() -> Path | None:
    """The file that LOWPREC_DATA means, None where it is not set."""
    setting = os.environ.get("LOWPREC_DATA", "").strip()
    if not setting:
        return None
    path = Path(setting).expanduser()
    if path.is_dir():
        path = path / SHAKESPEARE
        if not path.is_file():
            raise DataError(f"LOWPREC_DATA is the folder {setting}, and there is no {SHAKESPEARE} in it")
    elif not path.is_file():
        raise DataError(f"LOWPREC_DATA is {setting}, and there is no such file or folder. Correct it, or unset it")
    return path


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: byte {error.start} is no character's. Convert it first") from error


def _is_shakespeare(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _download(path: Path) -> str:
    """Fetch tiny Shakespeare to `path`; "" when that worked, else the reason why not, in words."""
    try:
        import pooch
    except ImportError:
        return "pooch is not installed"
    downloader = pooch.HTTPDownloader(progressbar=False, timeout=_TIMEOUT_S)
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # which text it is, is said once, by us
    try:
        pooch.retrieve(URL, f"sha256:{SHA256}", fname=path.name, path=path.parent, downloader=downloader)
    except ValueError as error:
        if "hash" not in str(error):
            return _in_a_line(error)
        return "what came back is another file (its checksum is wrong)"
    except OSError as error:  # requests' own errors are OSErrors too
        return _in_a_line(error)
    except Exception as error:  # a broken connection comes as whatever the library below http raises
        return f"{type(error).__name__}: {_in_a_line(error)}"
    finally:
        logger.setLevel(level)
    return ""


def _in_a_line(error: Exception, limit: int = 120) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _python_source() -> str:
    """The modules at the top of the standard library, in the order of their names, as long as they are plain ASCII."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        with contextlib.suppress(OSError):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            if content.isascii():
                parts.append(content.decode())
                size += len(content)
        if size >= _EMBEDDED_BYTES:
            break
    if not parts:
        raise DataError(f"there is no source in {folder} to train on. Set LOWPREC_DATA to a text file of your own")
    return "".join(parts)[:_EMBEDDED_BYTES]


# --- characters as tokens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The characters that a text is made of, in the order of their code points; a token is a place in it."""

    characters: str

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`: uint8, or uint16 for more than 256 characters; one dimension.

        Raises DataError that names the characters that the vocabulary lacks.
        """
        known, points = _code_points(self.characters), _code_points(text)
        places = np.searchsorted(known, points)
        missing = np.flatnonzero(known[np.minimum(places, len(known) - 1)] != points)
        if missing.size:
            which = sorted({text[i] for i in missing})
            some = ", ".join(map(repr, which[:5])) + (" and others" if len(which) > 5 else "")
            raise DataError(
                f"the vocabulary of {len(self)} characters lacks {some} (first at character {missing[0]}). "
                "A model knows only the characters of the text that it was trained on"
            )
        return places.astype(self.dtype)

    def decode(self, tokens: Tensor | np.ndarray | list[int]) -> str:
        """The text that `tokens`, one dimension of integers, stand for."""
        return "".join(self.characters[int(token)] for token in tokens)

    @property
    def dtype(self) -> type:
        return np.uint8 if len(self) <= 256 else np.uint16


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A text as tokens, cut into "train" (the first nine tenths) and "validation" (the rest).

    tokens: uint8 or uint16, one dimension, of the whole text; mapped from a file, so read only. name: of the text.
    sha256: of the text. line: where it is from, in words.
    """

    tokens: np.ndarray
    vocabulary: Vocabulary
    name: str
    sha256: str
    line: str

    def split(self, name: str) -> np.ndarray:
        """The tokens of "train" or "validation"."""
        if name not in SPLITS:
            raise DataError(f"there is no split {name!r}. The splits are: {', '.join(SPLITS)}")
        middle = int(0.9 * len(self.tokens))
        return self.tokens[:middle] if name == "train" else self.tokens[middle:]

    def batch(
        self,
        split: str,
        generator: torch.Generator,
        batch: int = 12,
        context: int = 64,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """(x, y): `batch` pieces of `context` tokens from random places, and the same one token further on.

        generator: on the CPU; `step_generator` gives the one of a step. Returns int64 tensors (batch, context).
        Raises DataError when the split is not longer than the context.
        """
        tokens = self.split(split)
        _require_longer(tokens, context, split)
        starts = torch.randint(len(tokens) - context, (batch,), generator=generator)
        return self._pieces(tokens, starts.numpy(), context, device)

    def even_batch(
        self, split: str, which: int, of: int, batch: int = 12, context: int = 64, device: str | torch.device = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """(x, y) as `batch` gives them, without chance: number `which` of `of` batches, spread evenly over the split.

        Losses over the same `of` batches can be compared: between steps, runs and machines.
        """
        tokens = self.split(split)
        _require_longer(tokens, context, split)
        starts = np.linspace(0, len(tokens) - context - 1, of * batch).astype(np.int64)
        return self._pieces(tokens, starts[which * batch : (which + 1) * batch], context, device)

    def _pieces(self, tokens: np.ndarray, starts: np.ndarray, context: int, device) -> tuple[Tensor, Tensor]:
        pieces = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
        x, y = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
        if torch.device(device).type == "cuda":  # the copy runs while the GPU computes
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)


def _require_longer(tokens: np.ndarray, context: int, split: str) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"the text is too short: its {split} part has {len(tokens)} characters, and a context of {context} needs "
            f"{context + 1} or more. Take a longer text (LOWPREC_DATA), or a shorter context"
        )


def step_generator(seed: int, step: int, part: int = 0) -> torch.Generator:
    """The random generator of one step's batch, whatever was drawn before: a run can go on from any step.

    part: which of several batches of the step (accumulated, or on several processes).
    """
    state = np.random.SeedSequence((seed, step, part)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def load_corpus(say=print) -> Corpus:
    """The text to train on, as tokens; `say` is called with the line that says which text it is.

    Raises DataError where `LOWPREC_DATA` names something that cannot be used.
    """
    text = find_text()
    say(text.line)
    return corpus_of(text)


def corpus_of(text: Text) -> Corpus:
    """The corpus of a text. Its tokens are mapped from the cache, where they are written first if they are missing."""
    if not text.characters:
        raise DataError(f"{text.name} is empty")
    vocabulary = Vocabulary.of(text.characters)
    if len(vocabulary) > 2**16:
        raise DataError(f"{text.name} has {len(vocabulary)} different characters, and a token has room for 65,536")
    tokens = vocabulary.encode(text.characters)
    return Corpus(_mapped(tokens, text.sha256), vocabulary, text.name, text.sha256, text.line)


def _mapped(tokens: np.ndarray, key: str) -> np.ndarray:
    """The same tokens from a file in the cache. Where none can be written they stay in memory, which is no fault."""
    little = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    path = cache_folder() / f"tokens-{key[:16]}.bin"
    try:
        if not path.is_file() or path.read_bytes() != little.tobytes():
            write_whole(path, little.tobytes())
        return np.memmap(path, dtype=little.dtype, mode="r")
    except (OSError, WorkspaceError) as error:
        print(f"The tokens are kept in memory: {_in_a_line(error)}", file=sys.stderr)
        return tokens
