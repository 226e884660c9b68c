"""What stands in YAML and JSON."""


def having(key, document):
    """The objects in a document that have a key."""
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    own = [document] if isinstance(document, dict) and key in document else []
    return own + [each for one in inner for each in having(key, one)]
