"""Makes the reference pages of the Python package from its sources, without importing them.

Each module has a page with the names of its __all__, in that order. A class, function or method without a docstring is
an error, because the page shows its docstring. A method that calls a function of the header links to that function.
"""

import ast
import pathlib
import re
import sys

MODULES = {"gradcodec": "__init__.py", "gradcodec.torch": "torch.py", "gradcodec.jax": "jax.py"}
# Prefix of the functions of the header that the methods of each class call.
PREFIXES = {
    "GradCodec": "gc_", "Codec": "gc_codec_", "AllReduce": "gc_allreduce_", "Communicator": "gc_comm_",
    "Kernel": "gc_kernel_", "Share": "gc_share_",
}  # fmt: skip
IN_C = {"Kernel.__call__": "gc_kernel_run",
        "Communicator.allreduce": "gc_allreduce_create", "GradCodec.codec": "gc_codec_create"}  # fmt: skip

# Types of the first argument of an __init__ that only the package itself calls.
INTERNAL = {"Communicator", "Group", "Library"}


class Package:
    """Parses the source files on demand, and finds the definitions of names in them."""

    def __init__(self, folder):
        self.folder, self.trees = folder, {}

    def tree(self, file):
        if file not in self.trees:
            self.trees[file] = ast.parse((self.folder / file).read_text())
        return self.trees[file]

    def exported(self, file):
        for node in self.tree(file).body:
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
                return ast.literal_eval(node.value)
        sys.exit(f"{file} has no __all__")

    def find(self, file, name):
        """Returns the file and the node of a class or function that a file defines or imports, or None."""
        for node in self.tree(file).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return file, node
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{node.module}.py", alias.name)
        return None

    def methods(self, file, node):
        """Returns the methods of a class and of its bases in this package, by name."""
        found = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        for base in node.bases:
            inherited = self.find(file, base.id) if isinstance(base, ast.Name) else None
            if inherited:
                found = {**self.methods(*inherited), **found}
        return found


def text_of(name, node):
    text = ast.get_docstring(node)
    if not text:
        sys.exit(f"{name} has no docstring, and its reference is the docstring")
    return text


def signature(node, bound):
    """Returns the parameters and the result type of a function as source text."""
    arguments = node.args
    if bound:
        first = arguments.posonlyargs or arguments.args
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs[1:], args=arguments.args[1 if first is arguments.args else 0 :],
            vararg=arguments.vararg, kwonlyargs=arguments.kwonlyargs, kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg, defaults=arguments.defaults,
        )  # fmt: skip
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){result}"


def decorators(node):
    return {ast.unparse(each) for each in node.decorator_list}


def made_by(node, methods):
    """Returns the arguments that construct a class, or an empty text if only the package constructs it."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and not each.target.id.startswith("_")]
    if "__init__" in methods:
        first = methods["__init__"].args.args[1].annotation
        if first is not None and ast.unparse(first) in INTERNAL:
            return ""
        return signature(methods["__init__"], True).partition(" -> ")[0]
    if any("dataclass" in each for each in decorators(node)) or "NamedTuple" in map(ast.unparse, node.bases):
        return "(" + ", ".join(ast.unparse(field) for field in fields) + ")"
    return ""


class Reference:
    """Makes the pages of the package. `markdown` converts a docstring; `names` has the names of the header."""

    def __init__(self, folder, markdown, names, directive):
        self.package, self.markdown, self.names, self.directive = Package(folder), markdown, names, directive

    def words(self, text):
        # A docstring's indented blocks are Python, or a table of words.
        made = self.markdown(text).replace("```c\n", "```python\n")
        return re.sub(r"```text\n(?=.*(?: = |\(|^import ))", "```python\n", made)

    def method(self, of, name, node):
        kinds = decorators(node)
        kind = "py:property" if "property" in kinds else "py:method"
        said = "" if kind == "py:property" else signature(node, "staticmethod" not in kinds)
        in_c = IN_C.get(f"{of}.{name}", PREFIXES.get(of, "-") + name)
        link = f"\n\n*In C*: {{c:func}}`{in_c}`." if in_c in self.names else ""
        return self.directive(kind, f"{name}{said}", self.words(text_of(f"{of}.{name}", node)) + link)

    def one(self, file, name):
        where, node = self.package.find(file, name)
        if isinstance(node, ast.FunctionDef):
            return self.directive("py:function", f"{name}{signature(node, False)}", self.words(text_of(name, node)))
        methods = self.package.methods(where, node)
        public = [each for each in methods if not each.startswith("_") or each == "__call__"]
        inner = [self.method(name, each, methods[each]) for each in public]
        values = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
                  and each.targets[0].id.isupper()]  # fmt: skip
        members = "\n".join(f"- `{each.targets[0].id}` = {each.value.value}" for each in values)
        kind = "py:exception" if "Error" in name and "RuntimeError" in map(ast.unparse, node.bases) else "py:class"
        body = [self.words(text_of(name, node)), *filter(None, [members]), *inner]
        return self.directive(kind, name + made_by(node, methods), "\n\n".join(body), "`````")

    def page(self, module, file):
        names = self.package.exported(file)
        defined = [name for name in names if self.package.find(file, name)]
        plain = [name for name in names if name not in defined and not name.startswith("__")]
        body = [self.words(ast.get_docstring(self.package.tree(file)))]
        if plain:
            listed = ", ".join(f"`{name}`" for name in plain)
            body.append(f"*Constants and types* that the header explains: {listed}.")
        body += [self.one(file, name) for name in defined]
        current = self.directive("py:module", module, "")
        return f"# {module}\n\n{current}\n\n" + "\n\n".join(body) + "\n"

    def pages(self):
        """Returns the text of each page, by the name of its file without folder and suffix."""
        return {module.replace(".", "_"): self.page(module, file) for module, file in MODULES.items()}
