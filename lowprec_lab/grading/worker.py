"""The worker: loads one answer and serves calls of it over a socket, in a process that the sandbox made for it.

It holds the learner's code and the references of earlier exercises, and nothing else: no check, no seed, no expected
value. Whatever it replies, right or forged, is only a result that the judge compares.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable

from lowprec_lab.blanks import BLANKS, SUPPLIED, earlier_than, load_chapters
from lowprec_lab.calls import (
    TOO_MUCH_MEMORY,
    AnswerFailed,
    build_answer,
    call_answer,
    call_scenario,
    differentiate_answer,
)
from lowprec_lab.grading import wire
from lowprec_lab.limits import quiet
from lowprec_lab.sources import AnswerError, Source, earlier_answers, load

PRINTED_LIMIT = 2000
_MOST_OBJECTS = 1000


class Served:
    """One answer, and the objects it has built, by number."""

    def __init__(self) -> None:
        self.function: Callable | None = None
        self.objects: list[object] = []

    def load(self, exercise: str, text: str, helpers: str, earlier: dict[str, tuple[str, str]]) -> None:
        """Run the answer's source. earlier: (source, helpers) of each earlier exercise, the references or the own."""
        load_chapters()
        sources = {name: Source(*each) for name, each in earlier.items()}
        find = earlier_answers(sources)
        SUPPLIED.update({each.name: find(each.name) for each in earlier_than(exercise)})  # for given code
        self.function = load(Source(text, helpers), BLANKS[exercise], find, f"answer: {exercise}")

    def call(self, args: tuple, kwargs: dict) -> object:
        return call_answer(self.function, args, kwargs)

    def differentiate(self, args: tuple, kwargs: dict, gradients: tuple) -> tuple:
        return differentiate_answer(self.function, args, kwargs, gradients)

    def scenario(self, args: tuple, kwargs: dict, name: str, module: str) -> object:
        return call_scenario(self.function, args, kwargs, name, module)

    def build(self, args: tuple, kwargs: dict) -> int:
        if len(self.objects) >= _MOST_OBJECTS:
            raise AnswerFailed("exception", "It built too many objects.")
        self.objects.append(build_answer(self.function, args, kwargs))
        return len(self.objects) - 1

    def method(self, args: tuple, kwargs: dict, thing: int, name: str) -> object:
        try:
            bound = getattr(self.objects[thing], name)
        except Exception as error:
            raise AnswerFailed("exception", f"It raised {type(error).__name__} for .{name}") from None
        return call_answer(bound, args, kwargs)


def serve(channel: socket.socket) -> None:
    """Answer requests until the judge hangs up. A request is (verb, arguments...).

    A reply is {"ok": result, "printed": text} or {"failed": (kind, sentence, where), "printed": text}.
    """
    served = Served()
    verbs = {"load": served.load, "call": served.call, "differentiate": served.differentiate}
    verbs |= {"scenario": served.scenario, "build": served.build, "method": served.method}
    while True:
        try:
            verb, *arguments = wire.receive(channel)
            wire.send(channel, _reply(verbs[verb], arguments))
        except wire.WireError:
            return


def _reply(verb: Callable, arguments: list) -> dict:
    printed = io.StringIO()
    try:
        with quiet() as printed:
            result = verb(*arguments)
        wire.pack(result)
        reply = {"ok": result}
    except AnswerFailed as failure:
        reply = {"failed": (failure.kind, failure.sentence, failure.where)}
    except AnswerError as error:
        reply = {"failed": ("unusable", str(error), "")}
    except TypeError as error:  # the result cannot be packed
        reply = {"failed": ("type", f"It returned something that is no data: {error}.", "")}
    except MemoryError:
        reply = {"failed": ("memory", TOO_MUCH_MEMORY, "")}
    except BaseException as error:  # a KeyboardInterrupt of the answer's own, and other classes that nobody catches
        reply = {"failed": ("exception", f"It raised {type(error).__name__}", "")}
    return reply | {"printed": _start_of(printed)}


def _start_of(printed: io.StringIO) -> str:
    try:
        printed.seek(0)
        return printed.read(PRINTED_LIMIT)
    except Exception:  # the answer had it in its hands, as sys.stdout, and may have closed it
        return ""
