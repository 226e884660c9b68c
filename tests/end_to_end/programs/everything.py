"""bench/gpu/all.py with other steps: one fails, and one does not end."""

from pathlib import Path

import all as everything

everything.STEPS = [
    everything.Step("good", ["-c", "print('a|b'); print()"]),
    everything.Step("bad", ["-c", "import sys; sys.exit('no good')"]),
    everything.Step("long", ["-c", "import os, time; os.fork(); os.write(1, b'begun\\n'); time.sleep(1000)"]),
    everything.Step("bench", [str(Path(__file__).with_name("one_row.py"))], True),
    everything.Step("late", ["-c", ""]),
]
everything.LONGEST_S = 2
everything.why_not = lambda: ""
everything.about_gpu = lambda: {"gpu": "none at all", "driver": "1.2"}
everything.main()
