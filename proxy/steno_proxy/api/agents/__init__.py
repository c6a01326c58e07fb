"""The agents' routes, under `/{trial_id}/`: turns, models, token counts, stored responses."""
