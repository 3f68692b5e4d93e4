"""The radix tree as one sees it: a node a line, with its text, its holders and its age."""

from collections.abc import Callable

from rich.markup import escape
from rich.tree import Tree

from stage7_radix.radix_tree import Node, RadixTree


def drawing(tree: RadixTree, decode: Callable[[list[int]], str], width: int = 48) -> Tree:
    """To print with rich. `decode` turns tokens into text; long ones are cut in the middle."""
    counts = f"{tree.num_pages} pages of {tree.page_size}, {tree.num_locked} of them locked"
    result = Tree(f"[bold]root[/] [dim]{counts}[/]")
    stack = [(tree.root, result)]
    while stack:
        node, branch = stack.pop()
        stack += [(child, branch.add(label(child, tree.root.used, decode, width))) for child in node.children.values()]
    return result


def label(node: Node, now: int, decode: Callable[[list[int]], str], width: int) -> str:
    text = decode(node.key.tolist())
    if len(text) > width:
        text = f"{text[: width // 2]} … {text[-(width // 2) :]}"
    salt = f" [yellow]salt {escape(node.salt)}[/]" if node.salt else ""
    facts = f"{len(node.key)} tokens, held by {node.locks}, used {now - node.used} calls ago"
    return f"{escape(repr(text))}{salt} [dim]{facts}[/]"
