"""Rewards and environments that do harm, for test_pool.py and test_environments.py."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def good(prompt, completion, row):
    return len(completion) + row.get("more", 0)


def parts(prompt, completion, row):
    return {"length": len(completion), "true": True, "half": 0.5}


def lucky(prompt, completion, row):
    """What random and hashing give, which depend on the process where nothing is done about it."""
    return {"random": random.random(), "order": hash("a text") % 1000}


def raises(prompt, completion, row):
    raise LookupError("no\nluck")


def hangs(prompt, completion, row):
    time.sleep(600)


def hangs_in_c(prompt, completion, row):
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 60)))


def ignores_signals(prompt, completion, row):
    for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def alone(prompt):
    return 1


async def waits(prompt, completion, row):
    return 1


def prints(prompt, completion, row):
    for _ in range(1024):
        print("x" * 2**20)
        os.write(2, b"x" * 2**20)
    return 1


def reads_stdin(prompt, completion, row):
    return float(input() == "")


def eats(prompt, completion, row):
    return len(bytearray(4 * 2**30))


def eats_in_c(prompt, completion, row):
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    ctypes.memset(libc.malloc(ctypes.c_size_t(4 * 2**30)), 1, 4 * 2**30)
    return 1


def forks(prompt, completion, row):
    """Returns twice, from the fork with another value and sooner."""
    if os.fork():
        time.sleep(0.2)
        return 1
    return 2


def leaves_a_sleeper(prompt, completion, row):
    subprocess.Popen(SLEEP, start_new_session=True)
    return 1


def leaves_a_daemon(prompt, completion, row):
    """A grandchild without a parent, that holds all descriptors."""
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
    return 1


def dies_and_leaves_a_daemon(prompt, completion, row):
    leaves_a_daemon(prompt, completion, row)
    os._exit(5)


def ends(prompt, completion, row):
    os._exit(0)


def crashes(prompt, completion, row):
    ctypes.string_at(0)


def kills_its_worker(prompt, completion, row):
    os.kill(os.getppid(), signal.SIGKILL)


def waits_to_be_killed(prompt, completion, row):
    """Writes row["file"] and waits, unless it is there."""
    if not os.path.exists(row["file"]):
        with open(row["file"], "w") as file:
            file.write("begun")
        time.sleep(60)
    return random.random()


def closes_all_and_hangs(prompt, completion, row):
    os.closerange(0, 4096)
    time.sleep(600)


def writes_everywhere(prompt, completion, row):
    for number in range(3, 64):
        try:
            os.write(number, b"[1]\n")
        except OSError:
            continue
    time.sleep(600)


def sets_an_alarm(prompt, completion, row):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    os.chdir("/")
    return 1


def leaves_a_thread(prompt, completion, row):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 1


def hangs_with_a_sleeper(prompt, completion, row):
    """Writes row["file"] when it is about to hang."""
    leaves_a_sleeper(prompt, completion, row)
    leaves_a_daemon(prompt, completion, row)
    with open(row["file"], "w") as file:
        file.write("begun")
    hangs_in_c(prompt, completion, row)


KEPT = []


def keeps(prompt, completion, row):
    """Adds 60 MiB that stay."""
    KEPT.append(bytearray(60 * 2**20))
    return os.getpid()


class Echo:
    """Shows how many texts it saw in this life, and what random said; over after row["turns"]."""

    def reset(self, row, seed):
        self.row, self.random, self.seen = row, random.Random(seed), []
        return None if row.get("own") else f"begin {self.random.randrange(1000)}"

    def step(self, text, tool_calls):
        if text == "hang":
            time.sleep(600)
        if text == "die":
            os._exit(9)
        if text == "wait to be killed" and not os.path.exists(self.row["file"]):
            with open(self.row["file"], "w") as file:
                file.write("begun")
            time.sleep(60)
        if text == "raise":
            raise ValueError("cannot go on")
        if text == "wrong":
            return "no tuple"
        self.seen.append((text, tool_calls, self.random.randrange(1000), random.randrange(1000)))
        over = len(self.seen) >= self.row.get("turns", 100)
        return [{"role": "user", "content": repr(self.seen)}], {"steps": len(self.seen)}, over


class Shell:
    """Has a process of its own from turn to turn."""

    def reset(self, row, seed):
        self.process = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return None

    def step(self, text, tool_calls):
        self.process.stdin.write(f"{text}\n")
        return self.process.stdout.readline().strip(), 0.0, text == "bye"


class NoSeed:
    def reset(self, row):
        return None

    def step(self, text, tool_calls):
        return None, 0.0, True


class NoStep:
    def reset(self, row, seed):
        return None


def begins_again(prompt, completion, row):
    """Tells the worker, over its socket, that another call has begun, and another."""
    while True:
        for number in range(3, 20):
            try:
                os.write(number, b'{"begin": true}\n')
            except OSError:
                continue
        time.sleep(0.05)
