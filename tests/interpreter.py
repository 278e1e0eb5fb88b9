"""Makes Triton's interpreter faster, which runs the kernels where there is no GPU."""

from types import FunctionType, ModuleType


def patch_languages_once() -> None:
    """Let only the outermost call of a function patch triton.language.

    The interpreter replaces the builtins of triton.language at every call of every function, also
    of one that a kernel calls, such as tl.sum. That is most of its time. In an inner call they are
    replaced already, so nothing is left to do. Does nothing if Triton is missing or differs inside.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope") or not hasattr(interpreter, "_patch_lang"):
        return

    patch = interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch_what_is_left(function: FunctionType):
        named = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        wanted = {module for module in named if module in (language, language.core)}
        left = wanted - patched
        if not left:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = patch(function)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            patched.clear()

        scope.restore = restore_and_forget
        patched.update(left)
        return scope

    interpreter._patch_lang = patch_what_is_left
