"""Attacks that return objects which lie about what they are, or which change after they were looked at."""

from lowprec_lab.bench.attacks import Attack

LYING_NUMBER = """
class Lying({kind}):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __hash__(self):
        return 1
    def __repr__(self):
        return "448.0"
    def __class_getitem__(cls, key):
        return cls
"""

ATTACKS = [
    Attack(
        "number_equal_to_everything",
        "Returns a float of a class of its own that is equal to every number.",
        "return Lying(0.0)",
        before=LYING_NUMBER.format(kind="float"),
        exercise="max_finite",
    ),
    Attack(
        "integer_equal_to_everything",
        "Returns an int of a class of its own that is equal to every number, and says that it is a float.",
        "return Lying(0)",
        before=LYING_NUMBER.format(kind="int") + "    __class__ = property(lambda self: float)\n",
        exercise="max_finite",
    ),
    Attack(
        "text_equal_to_everything",
        "Returns a str of a class of its own that is equal to everything.",
        "return Lying('0')",
        before=LYING_NUMBER.format(kind="str"),
        exercise="max_finite",
    ),
    Attack(
        "class_that_is_every_class",
        "Returns an object whose metaclass says that it is an instance and a subclass of everything.",
        "return Everything()",
        before="""
            class Meta(type):
                def __eq__(cls, other):
                    return True
                def __hash__(cls):
                    return hash(float)
                def __instancecheck__(cls, thing):
                    return True
            class Everything(float, metaclass=Meta):
                __class__ = property(lambda self: float)
                def __eq__(self, other):
                    return True
                __hash__ = float.__hash__
        """,
        exercise="max_finite",
    ),
    Attack(
        "tensor_with_torch_function",
        "Returns a tensor of a class of its own that answers every question of torch itself.",
        "return torch.zeros(x.shape, dtype=torch.int32).as_subclass(Lying)",
        before="""
            class Lying(torch.Tensor):
                __class__ = property(lambda self: torch.Tensor)
                @classmethod
                def __torch_function__(cls, function, types, args=(), kwargs=None):
                    name = getattr(function, "__name__", "")
                    if name in ("equal", "allclose", "all", "__bool__", "eq", "__eq__"):
                        return True
                    with torch._C.DisableTorchFunctionSubclass():
                        return function(*args, **(kwargs or {}))
        """,
    ),
    Attack(
        "tensor_whose_numpy_lies",
        "Returns a tensor whose conversion to numpy gives whatever was compared last.",
        "return torch.zeros(x.shape, dtype=torch.int32).as_subclass(Lying)",
        before="""
            class Always(__import__("numpy").ndarray):
                def __array_ufunc__(self, *args, **more):
                    import numpy
                    return numpy.zeros(self.shape, bool)
                def __ne__(self, other):
                    import numpy
                    return numpy.zeros(self.shape, bool)
            class Lying(torch.Tensor):
                __class__ = property(lambda self: torch.Tensor)
                def numpy(self, **more):
                    return torch.Tensor.numpy(self.as_subclass(torch.Tensor)).view(Always)
                def detach(self):
                    return self
                def contiguous(self, **more):
                    return self
                def reshape(self, *shape):
                    return self
                def view(self, *shape):
                    return self
        """,
    ),
    Attack(
        "storage_that_changes_later",
        "Returns a tensor, and writes into its memory from a thread afterwards.",
        """
        import threading, time
        result = torch.zeros(x.shape, dtype=torch.int32)
        right = x.clone()
        def later():
            for _ in range(2000):
                result.random_()
                time.sleep(0.001)
        threading.Thread(target=later, daemon=True).start()
        return result
        """,
    ),
    Attack(
        "result_that_is_the_input",
        "Returns views of its input and changes them at the next call.",
        """
        held = globals().setdefault("held", [])
        for each in held:
            each.fill_(0)
        held.append(x)
        return x.detach().view(torch.int32) * 0 if x.dim() == 0 else x.detach().view(torch.int32).flip(0)
        """,
    ),
    Attack(
        "tuple_that_counts_itself",
        "Returns a tuple of a class of its own whose length and parts depend on who asks.",
        "return Lying((codes, codes, codes))",
        before="""
            class Lying(tuple):
                __class__ = property(lambda self: tuple)
                asked = 0
                def __len__(self):
                    return 3
                def __iter__(self):
                    return iter(())
                def __getitem__(self, place):
                    return self
                def __eq__(self, other):
                    return True
        """,
        exercise="split_fields",
    ),
    Attack(
        "tensor_of_no_device",
        "Returns tensors on the meta device, sparse ones, and quantized ones.",
        """
        calls = globals().setdefault("calls", [])
        calls.append(1)
        kinds = [
            lambda: torch.zeros(x.shape, dtype=torch.int32, device="meta"),
            lambda: torch.zeros(x.shape, dtype=torch.int32).to_sparse() if x.dim() else torch.zeros(()),
            lambda: torch.quantize_per_tensor(torch.zeros(x.shape), 1.0, 0, torch.qint32),
        ]
        return kinds[len(calls) % 3]()
        """,
    ),
    Attack(
        "giant_shapes",
        "Returns one number as a tensor of 2^60 elements, and tensors of strange strides.",
        """
        calls = globals().setdefault("calls", [])
        calls.append(1)
        if len(calls) % 2:
            return torch.zeros(1, dtype=torch.int32).expand(2**60)
        return torch.zeros(4, dtype=torch.int32).as_strided((2**20, 2**20), (0, 0))
        """,
    ),
    Attack(
        "array_of_objects",
        "Returns a numpy array of objects that are equal to everything.",
        "import numpy\nreturn numpy.array([Lying(0)] * max(1, x.numel()), dtype=object)",
        before=LYING_NUMBER.format(kind="int"),
    ),
    Attack(
        "object_with_a_command",
        "Returns an object that runs a command when it is pickled or copied.",
        "return Command(0.0)",
        before="""
            class Command(float):
                def __reduce_ex__(self, protocol):
                    import os
                    return os.system, ("touch @DROP@/reduced",)
                __deepcopy__ = __copy__ = lambda self, memo=None: self.__reduce_ex__(2)
        """,
        exercise="max_finite",
    ),
    Attack(
        "signature_that_lies",
        "Is a callable object, not a function, that passes its caller's checks off as its own.",
        "return 0.0",
        exercise="max_finite",
        answers={
            "max_finite": """
@fill
def max_finite(fmt):
    return 0.0
class Callable:
    __name__ = "max_finite"
    __lowprec_blank__ = "max_finite"
    def __call__(self, *args, **kwargs):
        raise SystemExit(0)
    def __getattr__(self, name):
        return lambda *args, **kwargs: True
max_finite = Callable()
"""
        },
    ),
]
