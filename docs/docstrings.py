"""Docstrings as Markdown: the fields that they list (`name: what it is`) become lists, and their sessions code.

Griffe calls this class when mkdocstrings reads a module (mkdocs.yml, extensions).
"""

import ast
import re

import griffe

SIGNATURE_OF = re.compile(r"(with_signature_of|_collective|_differentiable)\((\w+)\.(\w+)(?:, f?'(.*)')?\)")
FIELD = re.compile(r"(\w+(?:, \w+)*):(?: +|$)(.*)")


def fields(lines):
    """`name: text`, continued on indented lines, as a list; an indented `- ` makes a list in it."""
    items = []
    for line in lines:
        if found := FIELD.match(line):
            items.append(f"- **{found[1]}:** {found[2]}")
        elif (text := line.strip()).startswith("- "):
            items.append(f"    {text}")
        else:
            items[-1] += f" {text}"
    return "\n".join(items)


def paragraph(text):
    """One paragraph of a docstring."""
    lines = text.splitlines()
    if lines[0].startswith(">>> "):
        code = "\n".join(re.sub(r" *# doctest: \+SKIP$", "", line) for line in lines)
        return f"```pycon\n{code}\n```"
    if FIELD.match(lines[0]) and all(FIELD.match(line) or line.startswith(" ") for line in lines):
        return fields(lines)
    return text


def functions(module):
    """Those of a module, and of the modules in it."""
    for member in module.members.values():
        if member.is_alias:  # of an import
            continue
        if member.is_function:
            yield member
        elif member.is_module:
            yield from functions(member)


def in_order(known, order, module):
    """The parameters as `_collective` of this module puts them; those that `order` lacks go by name only."""

    def constant(name):
        return ast.literal_eval(str(module[name].value))

    by_position, by_name = griffe.ParameterKind.positional_or_keyword, griffe.ParameterKind.keyword_only
    left = {each.name: each for each in known}
    for name, default in constant("_WITHOUT_EFFECT").items():
        left[name] = griffe.Parameter(name, kind=by_position, default=repr(default))
    names = re.sub(r"{(\w+)}", lambda found: constant(found[1]), order).split()
    placed = [left.pop(name) for name in names]
    others = [left[each.name] for each in known if each.name in left]
    return placed + [
        griffe.Parameter(each.name, annotation=each.annotation, kind=by_name, default=each.default) for each in others
    ]


class Docstrings(griffe.Extension):
    """Changes every docstring that is read, and gives functions the signature that their decorator gives them."""

    def on_package(self, *, pkg, **_):
        """Called when all is read."""
        for function in functions(pkg):
            for found in (SIGNATURE_OF.fullmatch(str(each.value)) for each in function.decorators):
                if found:
                    source = pkg[f"{function.parent.resolve(found[2]).removeprefix('ringreduce.')}.{found[3]}"]
                    # as the decorators do
                    is_torch = found[1] == "_differentiable"
                    kept = [each for each in source.parameters if is_torch or each.name != "out"]
                    kept = in_order(kept, found[4], function.parent) if found[4] else kept
                    function.parameters, function.returns = griffe.Parameters(*kept), source.returns
                    if is_torch:  # whose docstring says only what is the gradient
                        function.docstring.value = f"{source.docstring.value}\n\n{function.docstring.value}"

    def on_object(self, *, obj, **_):
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(paragraph, re.split(r"\n\n+", obj.docstring.value)))
