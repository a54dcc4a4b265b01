"""Runs the script that it is given in a fork of another process, see forked_scripts.py.

It hands over its arguments, variables and standard files, and ends as that script has ended.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect("\0" + os.environ["TF_OOO_TESTS_FORKS"])
    request = json.dumps([sys.argv[1:], dict(os.environ)]).encode() + b"\n"
    sent = socket.send_fds(server, [request], [0, 1, 2])
    server.sendall(request[sent:])
    status = int(server.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
