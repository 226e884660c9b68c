"""One job, from a command line that was understood to an exit code.

plan            what will be started, with which variables: pure functions
run             starts it, and again after a failure; makes and clears away what that needs
mpirun          the process that starts the agents
ranks           the agents' connections: prints what ranks write, passes on what happens, as events
events          what those are
supervise       decides when ranks must end and how, says what happened
losses          lets an elastic job go on without ranks that are lost
membership      which ranks it has then: pure decisions
shutdown        which signals ranks get, and when
questions       what ranks answer when they are asked what they do
init_watch      ranks that wait, in ringreduce.init() or a collective, for others that never come
joining         ranks that all run alone
growth          hosts that come while an elastic job runs, and hosts that fail
restarts        the whole job again after a failure
control_socket  where `ringrun stacks` and `ringrun top` find a running job
signals         those that ringrun itself gets
"""
