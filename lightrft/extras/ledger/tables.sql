-- A line of `draws` is one group: sums over its responses, and how often each answer occurs.
CREATE TABLE IF NOT EXISTS prompts (
    row INTEGER PRIMARY KEY, location TEXT, prompt TEXT, labels TEXT);
CREATE TABLE IF NOT EXISTS held_out (prompt TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS draws (
    step INTEGER, row INTEGER, responses INTEGER, right INTEGER, reward REAL, squares REAL,
    tokens INTEGER, truncated INTEGER, answers TEXT);
CREATE INDEX IF NOT EXISTS draws_by_step ON draws (step);
CREATE INDEX IF NOT EXISTS draws_by_row ON draws (row);
CREATE VIEW IF NOT EXISTS rows AS
    SELECT row, location, prompt, labels, count(*) AS draws, sum(responses) AS responses,
        sum(right) AS right, sum(reward) AS reward, sum(squares) AS squares,
        sum(squares * responses > (1 + 1e-9) * reward * reward) AS with_signal,
        sum(tokens) AS tokens, sum(truncated) AS truncated, max(step) AS last_step
    FROM draws JOIN prompts USING (row) GROUP BY row;
