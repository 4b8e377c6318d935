#!/usr/bin/env python3
"""Writes the pages of the site for Sphinx: the documents of the repository, and the reference of the header and of the
Python package (package.py).

    pages.py FOLDER

Each section of include/gradcodec.h has its own page; its comments are Markdown. Sphinx reads the declarations as C, so
that the search finds every name and links lead to it. Documents of docs/ that no list below names end the guide.
"""

import pathlib
import re
import shutil
import sys

import package

ROOT = pathlib.Path(__file__).resolve().parents[2]

GUIDE = ["docs/START.md", "docs/INSTALL.md", "docs/CHOOSING.md", "docs/LANGUAGES.md", "examples/README.md"]
GUIDE += ["docs/FRAMEWORKS.md", "docs/CODECS.md", "docs/ALLREDUCE.md", "docs/SLOW_LINKS.md", "docs/ELASTIC.md"]
GUIDE += ["docs/KERNELS.md", "kernels/README.md", "docs/GLOSSARY.md"]
SPEED = ["docs/PERFORMANCE.md", "docs/WHEN.md", "bench/README.md"]
RULES = ["docs/API.md", "docs/PLATFORMS.md", "docs/ENVIRONMENT.md", "docs/NUMERICS.md", "docs/ABI.md", "SECURITY.md"]
PROJECT = ["CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md"]

# Words that also occur with another meaning than the status of this name.
ALSO_WORDS = {"OK", "CUDA"}


# --- the header -------------------------------------------------------------------------------------------------------


def words_of(comment):
    """Returns the text of a comment without its stars."""
    text = re.sub(r"^\s*/\*\*?\s?|\s*\*/\s*$", "", comment)
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in text.split("\n")).strip("\n")


def parts(header):
    """Returns the sections of the header: the text of each, and its declarations with their comments."""
    declared = header.split('extern "C" {\n#endif\n', 1)[1].split("\n#ifdef __cplusplus", 1)[0]
    sections = []
    for section in re.split(r"(?m)^(?=/\*\n)", declared)[1:]:
        text, items = section.split("*/\n", 1)
        found = re.findall(r"(?ms)^(/\*\*.*?\*/)\n(.*?)(?=\n\n|\Z)", items)
        sections.append((words_of(text + "*/"), [(words_of(comment), code.strip()) for comment, code in found]))
    return sections


def name_of(code):
    """Returns the name that a declaration declares."""
    if code.startswith("#define"):
        return code.split()[1]
    if code.startswith("enum"):
        return code.split()[1]
    if code.startswith("typedef"):
        return re.search(r"(\w+);$", code)[1]
    return re.search(r"(gc_\w+)\(", code)[1]


def named(sections):
    """Returns every name of the header with the Sphinx role that links to it."""
    names = {}
    for _, items in sections:
        for _, code in items:
            if code.startswith("enum"):
                names |= {name: "c:enumerator" for name in re.findall(r"^\s+(GC_\w+)", code, re.M)}
            kind = "c:macro" if code.startswith("#") else "c:type" if code.startswith("typedef") else "c:func"
            if not code.startswith("enum"):
                names[name_of(code)] = "c:struct" if code.startswith("typedef struct") and "{" in code else kind
    return names


class Markdown:
    """Converts comments to Markdown, and links the names in them."""

    def __init__(self, names, sections):
        self.names, self.sections = names, sections
        statuses = {name.removeprefix("GC_STATUS_"): name for name in names if name.startswith("GC_STATUS_")}
        self.statuses = {short: name for short, name in statuses.items() if short not in ALSO_WORDS}
        short = "|".join(sorted(self.statuses, key=len, reverse=True))
        self.pattern = re.compile(rf"(`[^`]*`)|\b(gc_\w+)\(\)|\b(G[CR]\w+\b(?!\*))|(?<![\w_])({short})(?![\w*])|docs/(\w+)\.md")

    def link(self, match):
        code, function, name, status, page = match.groups()
        if code and code[1:-1].removesuffix("()") in self.names:
            function = code[1:-1].removesuffix("()")
        if function in self.names:
            return f"{{{self.names[function]}}}`{function}`"
        if name in self.names:
            return f"{{{self.names[name]}}}`{name}`"
        if status:
            return f"{{c:enumerator}}`{status} <{self.statuses[status]}>`"
        if page:
            return f"[](../docs/{page}.md)"  # Sphinx inserts the title
        return match[0]

    def section(self, match):
        if match[0] not in self.sections:
            return match[0]
        return f"[{title(match[0])}]({page_of(match[0])}.md)"

    def paragraph(self, text):
        """Returns a paragraph as Markdown; parameters and errors become lists."""
        text = re.sub(r"(?<=see )[A-Z][A-Z -]*[A-Z]\b", self.section, text)
        joined = " ".join(text.split())
        if not re.match(r"\s*- ", text):
            parameters = re.split(r"(?:^|(?<=[.)]) )(?=(?:`\*?\w+`(?:, )?)+: )", joined)
            if len(parameters) > 1 and not parameters[0]:
                return "\n".join("- " + self.pattern.sub(self.link, line) for line in parameters[1:])
            error = rf"(?:(?:{'|'.join(self.statuses)}|CUDA)(?:, (?=[A-Z_]+\b))?)+"
            errors = re.split(rf"(?:^|(?<=[.)]) )(?={error}[:.])", joined)
            starts = re.match(rf"As gc_\w+\(\)|{error}[:.]", joined)
            if starts and len(joined) > 3:
                lines = [line for line in errors if line]
                return "*Errors*\n\n" + "\n".join("- " + self.pattern.sub(self.link, line) for line in lines)
        return self.pattern.sub(self.link, text)

    def __call__(self, text):
        blocks = []
        for block in re.split(r"\n\n+", text):
            if block.startswith("    "):
                if blocks and blocks[-1].startswith("```"):
                    blocks[-1] = blocks[-1].removesuffix("\n```") + "\n\n" + re.sub(r"(?m)^    ", "", block) + "\n```"
                else:
                    is_c = "#include" in block or re.search(r"(?m);( *//.*)?$", block)
                    language = "c" if is_c else "text"
                    blocks.append(f"```{language}\n" + re.sub(r"(?m)^    ", "", block) + "\n```")
            else:
                blocks.append(self.paragraph(block))
        return "\n\n".join(blocks)


def directive(name, argument, text, fence="````"):
    return f"{fence}{{{name}}} {' '.join(argument.split())}\n\n{text}\n{fence}"


def declaration(comment, code, markdown):
    """Returns a declaration as a directive of Sphinx' C domain."""
    if code.startswith("#define"):
        return directive("c:macro", code.split()[1], f"`{code.split(None, 2)[2]}`\n\n{markdown(comment)}")
    if "{" in code:
        members = re.findall(r"(?ms)^    (?:(/\*\*.*?\*/)\n\s+)?(\S.*?)([,;])\n(?=    \S|\})", code)
        kind = "c:enumerator" if code.startswith("enum") else "c:member"
        inner = [directive(kind, said, markdown(words_of(about)) if about else "", "````") for about, said, _ in members]
        return directive(
            "c:enum" if code.startswith("enum") else "c:struct",
            name_of(code),
            "\n\n".join([markdown(comment), *inner]),
            "`````",
        )
    if code.startswith("typedef struct"):
        return directive("c:type", name_of(code), markdown(comment))
    if code.startswith("typedef"):
        return directive("c:type", code.removeprefix("typedef ").rstrip(";"), markdown(comment))
    return directive("c:function", code.rstrip(";"), markdown(comment))


def title(words):
    return re.sub(r"\b(Nccl|Cpu)\b", lambda name: name[0].upper(), words.capitalize())


def page_of(heading):
    return heading.lower().replace(" ", "_").replace("-", "_")


def sentence(text):
    """Returns the first sentence, on one line."""
    return re.match(r".*?\.(?= |$)", " ".join(text.split()))[0]


def reference(header):
    """Returns the text of each page of the header's reference, by the name of its file."""
    sections = parts(header)
    headings = [text.partition("\n")[0] for text, _ in sections]
    markdown = Markdown(named(sections), headings)
    pages, rows = {}, []
    for text, items in sections:
        heading, _, about = text.partition("\n")
        page = page_of(heading)
        body = [markdown(about.strip("\n"))] + [declaration(*item, markdown) for item in items]
        pages[page] = f"# {title(heading)}\n\n" + "\n\n".join(part for part in body if part) + "\n"
        functions = [(comment, name_of(code)) for comment, code in items if re.search(r"(?m)^\w.*\bgc_\w+\(", code)]
        functions = [(comment, name) for comment, name in functions if markdown.names[name] == "c:func"]
        rows += [f"\n## [{title(heading)}]({page}.md)\n\n| function | what it does |\n|---|---|"]
        for about, name in functions:
            said = markdown.pattern.sub(markdown.link, sentence(about)).replace("|", "\\|")
            rows.append(f"| {{c:func}}`{name}` | {said} |")
    pages["functions"] = (
        "# All functions\n\nThe first sentence of each description. [API](../docs/API.md) has the rules for all of them.\n"
        + "\n".join(rows) + "\n"
    )
    return pages


# --- all pages --------------------------------------------------------------------------------------------------------


def toctree(caption, pages):
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def linked_names(text, names):
    """Returns the page with a link to the reference at each name of the header that is code in a sentence."""
    lines, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith(("    ", "#")):
            line = re.sub(
                r"(?<![\[`}])`(\w+)(?:\(\))?`(?![`\]])",
                lambda match: f"{{{names[match[1]]}}}`{match[1]}`" if match[1] in names else match[0],
                line,
            )
        lines.append(line)
    return "\n".join(lines)


def copy(path, folder, names, pages):
    """Copies a page and the files that it links to. README.md becomes the first page of the site. If the text of a link
    is the file name of a page, the title of the page replaces the text."""
    text = linked_names((ROOT / path).read_text(), names)
    for name, link in set(re.findall(r"\[([\w/.]+\.md)\]\(([^)#]+)\)", text)):
        page = ((ROOT / path).parent / link).resolve()
        if page.is_relative_to(ROOT) and str(page.relative_to(ROOT)) in pages:
            text = text.replace(f"[{name}]({link})", f"[]({link})")
    for link in re.findall(r"(?:\]\(|<img [^>]*src=\")([^)\"#:\s]+)", text):
        linked = (ROOT / path).parent / link
        if linked.is_dir():
            text = re.sub(rf"\[([^]]*)\]\({re.escape(link)}\)", r"\1", text)
        elif linked.suffix != ".md" and linked.is_file():
            target = folder / linked.resolve().relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, target)
    text = re.sub(r"\]\(((?:\.\./)*)README\.md(#[^)]*)?\)", r"](\1index.md\2)", text) if "kernels" not in path else text
    target = folder / ("index.md" if path == "README.md" else path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    listed = GUIDE + SPEED + RULES + PROJECT
    more = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    guide = GUIDE + [path for path in more if path not in listed]
    groups = [[path for path in group if (ROOT / path).exists()] for group in (guide, SPEED, RULES, PROJECT)]
    header = (ROOT / "include/gradcodec.h").read_text()
    names = named(parts(header))
    copied = ["README.md", *sum(groups, [])]
    for path in copied:
        copy(path, folder, names, copied)
    pages = reference(header)
    (folder / "reference").mkdir()
    for name, text in pages.items():
        (folder / f"reference/{name}.md").write_text(text)
    first = ["functions"]
    markdown = Markdown(names, [])
    of_python = package.Reference(ROOT / "python/gradcodec", markdown, names, directive).pages()
    for name, text in of_python.items():
        (folder / f"reference/{name}.md").write_text(text)
    order = [f"reference/{name}" for name in first + [name for name in pages if name not in first]]
    index = folder / "index.md"
    captions = ("Guide", "Speed", "Rules", "Project")
    trees = [toctree(caption, group) for caption, group in zip(captions, groups) if group]
    python = toctree("Python", [f"reference/{name}" for name in of_python])
    index.write_text("\n".join([index.read_text(), *trees[:1], python, toctree("C", order), *trees[1:]]))


if __name__ == "__main__":
    main()
