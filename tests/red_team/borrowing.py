"""Attacks that answer with somebody else's answer: the reference, the oracle, a library, a later exercise."""

from lowprec_lab.bench.attacks import Attack, answer_cell
from lowprec_lab.blanks import BLANKS, in_order

CHAPTER_EXERCISES = [blank.name for blank in in_order() if blank.chapter.name == "01_bit_layouts"]


def everywhere(body: str) -> dict[str, str]:
    """An answer with this body to every exercise of the chapter. In it, NAME is its name and ARGS its arguments."""
    made = {}
    for name in CHAPTER_EXERCISES:
        arguments = ", ".join(BLANKS[name].signature.parameters)
        made[name] = answer_cell(name, body.replace("NAME", name).replace("ARGS", arguments))
    return made


def for_all(name: str, tries: str, body: str) -> Attack:
    """One submission that answers every exercise in the same way, and none honestly."""
    return Attack(name, tries, answers=everywhere(body), honest=())


LATER = {
    "classify": """
        from lowprec_lab.bits import decode, min_normal, NumberClass
        values = decode(codes, fmt)
        result = torch.full(codes.shape, int(NumberClass.NORMAL), dtype=torch.int32)
        result[values.abs() < min_normal(fmt)] = int(NumberClass.SUBNORMAL)
        result[values == 0] = int(NumberClass.ZERO)
        result[values.isinf()] = int(NumberClass.INF)
        result[values.isnan()] = int(NumberClass.NAN)
        return result
    """,
    "decode": """
        import lowprec_lab.bits as bits
        return torch.where(bits.classify(codes, fmt) == 4, float("nan"), bits.decode(codes, fmt))
    """,
    "min_subnormal": """
        from lowprec_lab.bits import ulp
        return float(ulp(torch.zeros(()), fmt)) if fmt.subnormals and fmt.mantissa_bits else None
    """,
    "machine_epsilon": """
        from lowprec_lab.bits import ulp
        big = Format("big", 8, fmt.mantissa_bits)
        return float(ulp(torch.ones(()), big))
    """,
    "min_normal": """
        from lowprec_lab.bits import ulp
        return float(ulp(torch.zeros(()), fmt)) * 2**fmt.mantissa_bits if fmt.subnormals else 2.0 ** -fmt.bias
    """,
}

ATTACKS = [
    for_all(
        "its_own_blank",
        "Answers every exercise with the package's own function of that name.",
        "from lowprec_lab import bits\nreturn bits.NAME(ARGS)",
    ),
    for_all(
        "its_own_blank_imported_above",
        "The same, imported under another name when the answer is loaded.",
        "import importlib\nreturn getattr(importlib.import_module('lowprec_lab.bits'), 'NAME')(ARGS)",
    ),
    for_all(
        "own_name_as_a_global",
        "Finds its own name among its globals, where the notebook's import had put the package's function.",
        """
        import sys
        for names in (sys.modules["__main__"].__dict__, sys.modules["lowprec_lab.bits"].__dict__):
            other = getattr(names.get("NAME"), "__wrapped__", None)
            for each in (names.get("NAME"), other):
                if each is not None and each.__code__ is not sys._getframe().f_code:
                    result = each(ARGS)
                    if result is not None:
                        return result
        return 0
        """,
    ),
    for_all(
        "supplied",
        "Asks the package to supply the exercise.",
        "from lowprec_lab.exercises import supply\nreturn supply('NAME').function(ARGS)",
    ),
    for_all(
        "reference",
        "Asks the package for the reference.",
        "from lowprec_lab.sources import reference\nreturn reference('NAME')(ARGS)",
    ),
    for_all(
        "current",
        "Asks the package which function runs for the exercise now, after it took its own away.",
        """
        from lowprec_lab import blanks
        blanks.FILLED.pop("NAME", None)
        blanks.SUPPLIED.pop("NAME", None)
        return blanks.current("NAME")(ARGS)
        """,
    ),
    for_all(
        "reads_solutions",
        "Reads the reference in the clone's solutions/.",
        """
        import pathlib, re
        import lowprec_lab
        folder = pathlib.Path(lowprec_lab.__file__).parents[1] / "solutions"
        text = (folder / "01_bit_layouts.py").read_text()
        names = dict(globals())
        for part in text.split("# %%"):
            if "@fill" in part:
                exec(part.partition("@fill")[2], names)
        return names["NAME"](ARGS)
        """,
    ),
    for_all(
        "later_blanks",
        "Tries every blank of the course that takes as many arguments, its own and later ones among them.",
        """
        import lowprec_lab.bits as bits
        from lowprec_lab.blanks import BLANKS, in_order
        order = [blank.name for blank in in_order()]
        for other in ["NAME", *order[order.index("NAME"):]]:
            try:
                result = getattr(bits, other)(ARGS)
            except TypeError:
                continue
            if result is not None:
                return result
        return 0
        """,
    ),
    Attack(
        "solved_by_later_exercises",
        "Solves five exercises with exercises that come later.",
        answers={name: answer_cell(name, body) for name, body in LATER.items()},
        honest=(),
    ),
    for_all(
        "imports_the_oracle",
        "Imports the exact oracle.",
        "from lowprec_lab.graders import oracle\nreturn oracle.NAME(ARGS)",
    ),
    for_all(
        "oracle_by_its_path",
        "Loads the oracle's file by its path, without the package.",
        """
        import importlib.util, pathlib, sys
        import lowprec_lab
        path = pathlib.Path(lowprec_lab.__file__).parent / "graders" / "oracle.py"
        spec = importlib.util.spec_from_file_location("borrowed", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["borrowed"] = module
        spec.loader.exec_module(module)
        return module.NAME(ARGS)
        """,
    ),
    for_all(
        "oracle_in_memory",
        "Searches the objects in memory for a function of its name that is not its own.",
        """
        import gc, sys, types
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and each.__name__ == "NAME":
                if each.__module__.startswith("lowprec_lab.graders"):
                    return each(ARGS)
        for name, module in list(sys.modules.items()):
            if name.startswith("lowprec_lab.graders") and hasattr(module, "NAME"):
                return getattr(module, "NAME")(ARGS)
        return 0
        """,
    ),
    for_all(
        "callers_frames",
        "Climbs the frames above its call to the check and takes the oracle from there.",
        """
        import sys
        frame = sys._getframe()
        while frame is not None:
            oracle = frame.f_globals.get("oracle")
            if oracle is not None and hasattr(oracle, "NAME"):
                return oracle.NAME(ARGS)
            frame = frame.f_back
        return 0
        """,
    ),
    for_all(
        "lines_in_the_cache",
        "Searches linecache, the loaded code and all texts in memory for the reference's source.",
        """
        import gc, linecache
        texts = ["".join(entry[2]) for entry in linecache.cache.values() if len(entry) == 4]
        for each in gc.get_objects():
            if isinstance(each, dict):
                texts += [text for text in list(each.values()) if isinstance(text, str) and "def NAME(" in text]
        for text in texts:
            if "def NAME(" in text and "linecache" not in text and "BEGIN SOLUTION" in text:
                names = dict(globals())
                exec(text[text.index("def NAME("):], names)
                return names["NAME"](ARGS)
        return 0
        """,
    ),
    Attack(
        "library_ml_dtypes",
        "Decodes with ml_dtypes, which knows the registered formats.",
        """
        import ml_dtypes, numpy
        kinds = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
        return torch.from_numpy(codes.numpy().astype("uint8").view(kinds[fmt.name]).astype("float64"))
        """,
        exercise="decode",
    ),
    Attack(
        "library_gfloat",
        "Decodes with gfloat, which takes any format.",
        """
        import gfloat, numpy
        from gfloat.types import Domain, Signedness
        info = gfloat.FormatInfo(
            name="f", k=fmt.width, precision=fmt.mantissa_bits + 1, bias=fmt.bias,
            domain=Domain.Extended if fmt.specials == "ieee" else Domain.Finite, is_signed=fmt.signed,
            has_nz=fmt.specials != "fnuz",
            num_high_nans={"ieee": 2**fmt.mantissa_bits - 1, "fn": 1}.get(fmt.specials, 0),
            has_subnormals=fmt.subnormals, is_twos_complement=False,
        )
        return torch.from_numpy(gfloat.decode_ndarray(info, codes.numpy().astype("int64") % 2**fmt.width))
        """,
        exercise="decode",
    ),
    Attack(
        "library_torchao",
        "Decodes with torchao's own bit tricks.",
        """
        from torchao.prototype.custom_fp_utils import _floatx_unpacked_to_f32
        bits = codes.to(torch.uint8)
        return _floatx_unpacked_to_f32(bits, fmt.exponent_bits, fmt.mantissa_bits).double()
        """,
        exercise="decode",
    ),
    Attack(
        "library_torch",
        "Decodes with torch's casts, which know the registered formats of 8 and more bits only.",
        """
        views = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
        return codes.to(views[fmt.width]).view(fmt.torch_dtype).double()
        """,
        exercise="decode",
    ),
]
