"""Colocated functions and objects in processes of their own: `isolate="process"`.

A function of pure Python needs the interpreter, and while it has it, no other thread of the process runs Python: the
devices wait for their next program. In another process it has an interpreter of its own.

* `worker.py` is the program of a worker, `messages.py` what it and its parent send each other. A worker loads these two
  and `standard_objects.py` alone, and neither partjit nor jax: it starts within 0.2 s, and holds no devices.
* `process.py` is a worker as its parent sees it: started, asked, ended, died.
* `functions.py` gives every stream a worker, in which the functions called on it run.
* `objects.py` gives every object a worker, in which it is constructed and its methods run.

A call in a worker is an ordinary call of its stream whose body waits for the worker, without holding the interpreter.
So order, errors and results are those of any other call. A message travels through a socket; large arrays in it travel
through memory that both processes map. That memory has no name: it is gone with the two processes, however they end.
"""
