"""Tensors in memory that processes share: queues pass handles, never contents.

Everything of the standard library's `multiprocessing`, under the same names; see docs/data.md for how long shared
memory lives. Processes are spawned unless `set_start_method` says otherwise.
"""

from multiprocessing import AuthenticationError as AuthenticationError
from multiprocessing import BufferTooShort as BufferTooShort
from multiprocessing import ProcessError as ProcessError
from multiprocessing import TimeoutError as TimeoutError
from multiprocessing import active_children, current_process, parent_process

from ddp.multiprocessing.contexts import Process, default
from ddp.multiprocessing.spawning import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_processes,
)

Array = default.Array
Barrier = default.Barrier
BoundedSemaphore = default.BoundedSemaphore
Condition = default.Condition
Event = default.Event
JoinableQueue = default.JoinableQueue
Lock = default.Lock
Manager = default.Manager
Pipe = default.Pipe
Pool = default.Pool
Queue = default.Queue
RLock = default.RLock
RawArray = default.RawArray
RawValue = default.RawValue
Semaphore = default.Semaphore
SimpleQueue = default.SimpleQueue
Value = default.Value
allow_connection_pickling = default.allow_connection_pickling
cpu_count = default.cpu_count
freeze_support = default.freeze_support
get_all_start_methods = default.get_all_start_methods
get_context = default.get_context
get_logger = default.get_logger
get_start_method = default.get_start_method
log_to_stderr = default.log_to_stderr
set_executable = default.set_executable
set_forkserver_preload = default.set_forkserver_preload
set_start_method = default.set_start_method

__all__ = [
    "Array",
    "Barrier",
    "BoundedSemaphore",
    "Condition",
    "Event",
    "JoinableQueue",
    "Lock",
    "Manager",
    "Pipe",
    "Pool",
    "Process",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "Queue",
    "RLock",
    "RawArray",
    "RawValue",
    "Semaphore",
    "SimpleQueue",
    "Value",
    "active_children",
    "allow_connection_pickling",
    "cpu_count",
    "current_process",
    "freeze_support",
    "get_all_start_methods",
    "get_context",
    "get_logger",
    "get_start_method",
    "log_to_stderr",
    "parent_process",
    "set_executable",
    "set_forkserver_preload",
    "set_start_method",
    "spawn",
    "start_processes",
]
