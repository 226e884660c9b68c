"""Between ringrun and its agents.

wire        the messages
link        a connection: unix on this host, TCP from others
listener    ringrun's end of all of them
"""
