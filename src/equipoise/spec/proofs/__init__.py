"""What is proved of the definitions, through the definitions themselves.

A statement for every length is an induction over the fold that a sum is: it holds for nothing, and
if it holds for a sum it holds for one term more. z3 proves both parts; that they suffice, and that
a list's sum is the fold of its terms, is the principle of induction and stands outside. A sum of
squares is then one real number, of which only what was proved by induction is known.
"""
