"""The hosts of a command line: `-H h1:4,h2:4`."""

from .host import Host, merge, parse_host, shown


def parse_host_list(text: str) -> list[Host]:
    """Return the hosts of `h1:4,h2,[fe80::1]:2`, each once; UsageError if an item is no host.

    A name without slots leaves them unsaid (None), unless one is repeated: `h1,h1,h2` is 2 slots and 1.
    """
    items = [item.strip() for item in text.split(",")]
    return merge([parse_host(item, f"-H, item {number}, {shown(item)}") for number, item in enumerate(items, 1)])
