"""A local web page over runs, `agentrl view`: read-only handles, JSON answers, a server with a token, the page's files.

    opened_runs      which runs a page shows, and a handle of each
    run_answers      a run as JSON: its state, its curves, what happened when
    lanes            who did something in the last minutes
    episode_answers  its episodes as JSON: lists, one turn by turn, a group, a step
    notes            tags and a note on a run, in its folder
    page_steering    a run under way is paused, goes on, gets other settings
    file_edits       what the tool calls of a turn change in files
    web_page         routes, and who may ask
    page_server      listening, the address with the token
    bundle           one run as static files, to send
    recorded_run     the run that a page shows to somebody who has none
    assets/          the page: HTML, style, JavaScript modules without a build step

What a policy wrote is data all the way: JSON in an answer, set as textContent on the page.
"""
