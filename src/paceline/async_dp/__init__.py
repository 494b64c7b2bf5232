"""Asynchronous training in a star: workers that never wait, and a hub that takes in what each has learnt as it comes.

star.py           paceline.AsyncDataParallel, around a user's loop; hooks.py, place.py, share.py: steps,
address and cores, bandwidth
worker.py         which local step sends, which takes in, what of it counts
side.py           one fragment on a worker's side; the delta rule
spoke.py          a worker's conversation with a hub; terms.py: what passes between its two threads
communication.py  the thread that has it
policy.py, tune.py   what is sent and taken in by score; k, d and bits from measurement

hub.py            takes in, judges, merges, answers
serve.py          drives it in real time
centres.py        the fragments that all share; merge.py: the outer optimizers
screen.py, stale.py   which updates are refused, and how old they may be; rules.py: all that a hub is asked for
members.py        who is there, and how much each counts; fetches.py: who waits for the centre
leading.py        who gives the parameters that all share; population.py: who is replaced, when all go on together
heir.py           what outlives a hub beside its numbers
keeping/          journals and outboxes

layout.py         what lies where in the fragments of a model; packing.py, numbers.py: as bytes, as numbers
words.py, offer.py, mail.py, post.py   messages; what an update tells; messages as frames; frames that leave at a rate
"""
