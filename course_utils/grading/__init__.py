"""Marks for returned notebooks. For trusted submissions: answers run in processes of their own, without a sandbox.

`reading` takes a file in whatever state it came back; `finding` finds the answer to each exercise in it, with the help
of `parsing`; `programs` gathers what the answer needs, as source text; `inside` runs that in the ranks, away from the
judge; `marking` makes the marks of one notebook, `batch` those of a folder, `table` writes them down; `verification`
tries it all on the course's own editions.
"""
