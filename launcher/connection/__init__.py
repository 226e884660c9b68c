"""Between ringrun and its agents.

wire        the messages
frames      what travels of one, with proof of who sent it
link        a connection: unix on this host, TCP from others
queued      ringrun's end of one: who sends never waits
listener    ringrun's end of all of them
"""
