"""Objects that others own."""

import threading

from ringreduce.execution.living import Living


class Thing:
    pass


def test_who_is_gone_is_not_among_them():
    living, kept, dropped = Living(), Thing(), Thing()
    living.add(kept)
    living.add(kept)
    living.add(dropped)
    assert set(living) == {kept, dropped}
    del dropped
    assert list(living) == [kept]


def test_another_thread_may_add_one_meanwhile():
    """As where a thread makes an optimizer while the launcher asks for a report."""
    living, added = Living(), [Thing() for _ in range(3)]
    for each in added:
        living.add(each)
    seen = []
    for each in living:
        added.append(Thing())
        adder = threading.Thread(target=living.add, args=(added[-1],))
        adder.start()
        adder.join()
        seen.append(each)
    assert seen == added[:3]
    assert len(list(living)) == 6
