"""The chapters in reading order: the one list behind the map of progress, `lowprec-lab open` and the builder."""

from __future__ import annotations

from dataclasses import dataclass

_SPELLED = {"fp8": "FP8", "nanogpt": "nanoGPT", "gguf": "GGUF"}


@dataclass(frozen=True)
class Chapter:
    """One chapter, one room on every floor.

    name: "01_bit_layouts": solutions/<name>.py, notebooks/<name>/<name>.ipynb, work/<name>.ipynb.
    module: "bits": lowprec_lab/<module>.py, lowprec_lab/graders/<module>.py, answers/<module>.py.
    question: what the chapter answers; shown on the map.
    """

    name: str
    module: str
    question: str

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def title(self) -> str:
        """The name as words: "Bit layouts", "FP8 nanoGPT"."""
        words = [_SPELLED.get(word, word) for word in self.name[3:].split("_")]
        return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


CHAPTERS = (
    Chapter("00_start", "start", "How does this lab work?"),
    Chapter("01_bit_layouts", "bits", "What do 8 bits mean?"),
    Chapter("02_rounding", "rounding", "Which of the two neighbours?"),
    Chapter("03_accumulation", "accumulation", "Why is adding the hard part?"),
    Chapter("04_autocast", "autocast", "Who decides the dtype?"),
    Chapter("05_instruments", "instruments", "Which numbers would a format lose?"),
    Chapter("06_loss_scaling", "loss_scaling", "Why scale the loss before backward?"),
    Chapter("07_quantizer", "quantizer", "How does a tensor fit into 8 bits?"),
    Chapter("08_float8_linear", "float8_linear", "Which casts does a linear layer need?"),
    Chapter("09_scaled_mm", "scaled_mm", "Why does it fail on my GPU?"),
    Chapter("10_fp8_nanogpt", "recipes", "What does FP8 cost a GPT?"),
    Chapter("11_fp8_inference", "inference", "What does a served model need from 8 bits?"),
    Chapter("12_gguf", "gguf_blocks", "How do 4.5 bits hold a weight?"),
    Chapter("13_block_formats", "block_formats", "What do block scales buy?"),
    Chapter("14_distributed", "distributed", "What must many ranks agree on?"),
    Chapter("15_capstone", "capstone", "How few bits train a GPT?"),
)


def find_chapter(text: str) -> Chapter:
    """The chapter whose number ("1", "01"), name ("01_bit_layouts") or module ("bits") is `text`.

    Raises ValueError that lists the chapters there are.
    """
    wanted = str(text).strip()
    for chapter in CHAPTERS:
        if wanted in (chapter.name, chapter.module, chapter.number, chapter.number.lstrip("0") or "0"):
            return chapter
    known = ", ".join(chapter.name for chapter in CHAPTERS)
    raise ValueError(f"there is no chapter {wanted!r}. The chapters are: {known}")
