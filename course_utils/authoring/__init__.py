"""From one percent source per lesson to its learner and solved editions, and to the bundle an instructor hands out.

`python -m course_utils.authoring build` is the only writer of `notebooks/*.ipynb` and `notebooks/solutions/*.ipynb`.
"""
