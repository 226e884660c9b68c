"""Between ringrun and its agents.

wire        the messages
link        the sockets: unix on this host, TCP from others
"""
