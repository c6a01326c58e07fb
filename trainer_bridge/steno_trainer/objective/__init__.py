"""What a step makes small. Read in this order:

terms        what an objective is given of each token, and what it gives back
clip, dual_clip, cispo, sft      one objective each: its formula, its source, its function
registry     their names; `own` finds the function, also in a user's file
ratios       importance ratios: by token, or one for many
mismatch     corrects for the sampler's other probabilities
loss         all of it together, with the reference and the entropy, over N tokens
aggregation  what each token weighs in the step
"""
