"""The two halves of a step: planning it, and committing its results.

schedule.py    what a step computes: growth (grow.py), admission from the queue
               (admission.py, admit.py, prefix_hit.py, load.py), drafts
               (plan_drafts.py)
build_plan.py  the plan of it, as an executor gets it
commit.py      its results; discard.py, a step that failed
"""
