//! Compares the memory store with a real Redis on generated histories of commands: replies, values and notifications.
//! Other tests plant differences in the scripts, and show that the comparison finds each of them.

pub mod histories;
pub mod server;
pub mod watching;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::command::script::Script;
use crate::command::{acquire, adopt, claim, convert, fenced, inspect, release, renew, vote};
use crate::util::slot::Slot;

use histories::{Operation, Subject, histories, key};
use server::{Redis, Scripts};

/// A planted difference has to be found within this many histories.
const PLANTED_CASES: u32 = 1600;

/// Compares the memory store with Redis on up to `cases` generated histories. Returns the first difference that it
/// finds, after it has shortened the history.
fn shortened_difference(
    redis: &mut Redis,
    subject: Subject,
    scripts: &Scripts,
    seed: u8,
    cases: u32,
) -> Option<String> {
    first_difference(redis, subject, scripts, seed, cases, 200)
}

/// Whether a generated history finds the difference that is planted in `scripts`.
fn finds_planted(redis: &mut Redis, subject: Subject, scripts: &Scripts, seed: u8) -> bool {
    // The history is not shown, so it need not be shortened.
    first_difference(redis, subject, scripts, seed, PLANTED_CASES, 0).is_some()
}

fn first_difference(
    redis: &mut Redis,
    subject: Subject,
    scripts: &Scripts,
    seed: u8,
    cases: u32,
    max_shrink_iters: u32,
) -> Option<String> {
    let redis = std::cell::RefCell::new(redis);
    let config = Config {
        cases,
        max_shrink_iters,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&histories(subject), |history: Vec<Operation>| {
        let compared = redis.borrow_mut().compare(subject, scripts, &history);
        compared.map_err(TestCaseError::fail)
    });
    match result {
        Ok(()) => None,
        Err(TestError::Fail(how, history)) => Some(format!("{how}\n{history:#?}")),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

#[track_caller]
fn assert_same(subject: Subject, cases: u32) {
    let redis = &mut Redis::start();
    if let Some(how) = shortened_difference(redis, subject, &Scripts::real(), 1, cases) {
        panic!("{how}");
    }
}

#[test]
fn the_memory_store_replies_as_redis_does() {
    assert_same(Subject::Locks, 250);
}

#[test]
fn the_memory_store_shares_keys_as_redis_does() {
    assert_same(Subject::Shares, 400);
    assert_same(Subject::RollCalls, 400);
}

#[test]
fn a_memory_node_of_a_quorum_votes_as_redis_does() {
    assert_same(Subject::Votes, 250);
}

/// A node of a Cluster refuses keys that a call does not declare, and keys of several slots in one call.
#[test]
fn a_cluster_node_replies_as_one_server_does() {
    for (shard_slot, scripts) in [
        (None, Scripts::real()),
        (Slot::new(0), Scripts::real()),
        (Some(key(0).slot()), Scripts::of_one_slot()),
    ] {
        let mut redis = Redis::start_cluster_node(shard_slot);
        let is_old = !redis.knows_strict_scripts();
        if is_old && (scripts.are_strict() || shard_slot.is_some()) {
            // Redis 6.2 has no shard channels, and cannot keep scripts from a second slot.
            continue;
        }
        let how = shortened_difference(&mut redis, Subject::Locks, &scripts, 2, 100);
        assert_eq!(how, None, "{shard_slot:?}");
    }
}

#[test]
fn a_difference_planted_in_an_acquire_is_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        (&acquire::SCRIPT, "elseif last and last >= micros then", "elseif false then"),
        (&acquire::SCRIPT, "refused or redis.pcall('SET', key, value, 'NX', 'PX', ttl)", "refused or redis.pcall('SET', key, value, 'PX', ttl)"),
        (&acquire::SCRIPT, "queue and (mode == '-' or mode == '-+' or waiting ~= 0)", "queue and waiting ~= 0"),
        (&acquire::SCRIPT, "queue and (mode == '-' or mode == '-+' or waiting ~= 0)", "mode == '-' or mode == '-+'"),
        (&acquire::SCRIPT, "mode == '-' or mode == '-+' or", "mode == '-' or"),
        (&acquire::SCRIPT, "if held and not share and string.sub(held, 5, 36) == lease then", "if false then"),
        (&acquire::SCRIPT, "if string.sub(held, 38, 53) == '0000000000000000' then", "if false then"),
        (&acquire::SCRIPT, "and 0 or 2 do", "and 0 or 1 do"),
        (&acquire::SCRIPT, "if mode == '' or type(left) ~= 'number' then return unqueued(left) end", ""),
        (&acquire::SCRIPT, "lease .. ',' .. (kind == '0' and 0 or ttl) .. asked", "lease .. ',' .. ttl .. asked"),
        (&acquire::SCRIPT, "if is_notified then redis.pcall('ZREM', queue, polls) else entry = polls end", ""),
        (&acquire::SCRIPT, "place and mode == '-+' and", "place and"),
        (&acquire::SCRIPT, "if is_notified then redis.pcall('ZREM', queue, polls) else", "if not is_notified then"),
        (&acquire::SCRIPT, "if type(place) ~= 'string' or #place > 16 or string.find(place, '%D') then return unqueued(left) end", ""),
        (&acquire::SCRIPT, "held and not string.find(held, ' +', 55, true) and", "false and"),
        (&acquire::SCRIPT, "if doubt then", "if false then"),
        (&acquire::SCRIPT, "string.sub(held, mark_at + 2)", "''"),
        (&acquire::SCRIPT, "is_over = left <= 3000", "is_over = left <= 0"),
        (&acquire::SCRIPT, "is_over = left <= 3000", "is_over = true"),
        (&acquire::SCRIPT, "if doubt and mode ~= '' and", "if doubt and"),
        (&acquire::SCRIPT, "math.max(left - 3000, 1)", "left"),
        (&acquire::SCRIPT, "place = string.format('%.0f', place - 4000000000000000)", ""),
        (&acquire::SCRIPT, "if is_over and doubt == '?' or", "if false or"),
        (&acquire::SCRIPT, "if waiters[i] ~= entry then", "if true then"),
        (&acquire::SCRIPT, "left, ahead, is_over = 500, nil, false", "left, ahead, is_over = 500, ahead, false"),
        (&acquire::SCRIPT, "'! +', 'PX', 3500", "'! +', 'PX', 5500"),
        (&acquire::SCRIPT, "hinted[#hinted + 1] =", "hinted[1] ="),
        (&acquire::SCRIPT, "if comes_last and added == 1 then", "if comes_last then"),
        (&acquire::SCRIPT, "if comes_last and added == 1 then", "if added == 1 then"),
        (&acquire::SCRIPT, "    ahead = nil\n", ""),
        (&acquire::SCRIPT, "place = string.sub(mode, 2)", "place = ''"),
        (&acquire::SCRIPT, "if is_own then own = micros end", ""),
        (&acquire::SCRIPT, "left = in_queue and served and not set and redis.pcall('PTTL', key) or 0", ""),
        (&acquire::SCRIPT, "return { left, ahead, tonumber(place), set and set.limit }", "return { left, ahead + 1, tonumber(place) }"),
        (&acquire::SCRIPT, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (&acquire::SCRIPT, "if exists ~= 1 then", "if false then"),
        (&acquire::SCRIPT, "#value > 255 or", "#value > 60 or"),
        (&acquire::SCRIPT, "#place > 16 or", "#place > 15 or"),
        (&acquire::SCRIPT, "ttl = own_ttl", "ttl = polls and 100 or asked"),
        (&acquire::SCRIPT, "string.find(place, '%D')", "string.find(place, '%d')"),
    ];
    assert_found(Subject::Locks, plants);
}

#[test]
fn a_difference_planted_in_a_release_is_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        (&release::SCRIPT, "elseif last and last >= micros then", "elseif false then"),
        (&release::SCRIPT, "(granted == 0 or granted and", "(granted and"),
        (&release::SCRIPT, "ttl = was_late and 1000 or 100", "ttl = 30000"),
        (&release::SCRIPT, "ttl = was_late and 1000 or 100", "ttl = 100"),
        (&release::SCRIPT, "elseif now - place >", "elseif place - now >"),
        (&release::SCRIPT, "elseif now - place >", "elseif true or now - place >"),
        (&release::SCRIPT, "or 500000)", "or 0)"),
        (&release::SCRIPT, "was_late and 3000 or", ""),
        (&release::SCRIPT, "ms / 4", "ms / 2"),
        (&release::SCRIPT, ", 2000), '?', 3000", ", 20000), '?', 3000"),
        (&release::SCRIPT, ", 2000), '?', 3000", ", 2000), '', 3000"),
        (&release::SCRIPT, ", 2000), '?', 3000", ", 2000), '?', 0"),
        (&release::SCRIPT, "ttl = math.min(ms, ttl)", ""),
        (&release::SCRIPT, "mark ~= '' and ' ?' or ''", "''"),
        (&release::SCRIPT, "if place >= 4000000000000000 then", "if false then"),
        (&release::SCRIPT, "if listens then", "if true then"),
        (&release::SCRIPT, "gone = gone + 1", "gone = 1"),
        (&release::SCRIPT, "if gone > 0 and (not waiting or type(waiting) == 'number' and waiting > 8 - gone) then", "if false then"),
        (&release::SCRIPT, "local listens = is_own or polls", "local listens = true"),
        (&release::SCRIPT, "waiting ~= 0 and ' +' or ''", "''"),
        (&release::SCRIPT, "redis.pcall('ZPOPMIN', queue)", "redis.pcall('ZPOPMAX', queue)"),
        (&release::SCRIPT, "for _ = 1, 10000 do", "for _ = 1, 1 do"),
        (&release::SCRIPT, "#first[1] <= 256 and", "#first[1] <= 40 and"),
        (&release::SCRIPT, "asked >= '1'", "asked >= '3'"),
        (&release::SCRIPT, "ms <= 86400000", "ms < 90000"),
        (&release::SCRIPT, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (&release::SCRIPT, "if is_held and after then", "if false then"),
        (&release::SCRIPT, "== '?' then", "== '!' then"),
        (&release::SCRIPT, "too_early = listeners == 0 and", "too_early = listeners ~= 0 and"),
        (&release::SCRIPT, "elseif too_early then", "elseif false then"),
        (&release::SCRIPT, "result = 2\n", "result = 1\n"),
        (&release::SCRIPT, "' !' .. string.match(after, '^.(%S*)')", "' !'"),
        (&release::SCRIPT, "string.sub(lease, 1, 16) .. ' !'", "lease .. ' !'"),
        (&release::SCRIPT, "serves = is_freed and string.find(result, ' ', 55, true)", "serves = false"),
        (&release::SCRIPT, "ARGV[i], lease .. ',0' .. mode .. ',' .. own)", "ARGV[i])"),
        (&release::SCRIPT, "ARGV[i], lease .. ',0' .. mode .. ',' .. own)", "lease .. ',0' .. mode .. ',' .. own)"),
        (&release::SCRIPT, "and string.sub(result, 1, 36) == 'lh1 ' .. lease", ""),
        (&release::SCRIPT, "then return redis.pcall('DEL', KEYS[2]) end", "then return 1 end"),
        (&release::SCRIPT, "redis.pcall('GETRANGE', KEYS[2], '0', '255') == ARGV[1]", "true"),
        (&release::SCRIPT, "KEYS[2], '0', '255') == ARGV[1]", "KEYS[2], '0', '255') ~= ARGV[1]"),
        (&release::SCRIPT, "then lease = string.sub(lease, 5, 36) end", "then lease = '' end"),
    ];
    assert_found(Subject::Locks, plants);
}

#[test]
fn differences_in_other_lock_scripts_are_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        (&renew::SCRIPT, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '34'"),
        (&adopt::SCRIPT, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (&inspect::SCRIPT, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (&inspect::SCRIPT, "#value > 255 or", "#value > 60 or"),
        (&renew::SCRIPT, "~= 'lh1 ' .. lease then", "== '' then"),
        (&renew::SCRIPT, "math.max(result, tonumber(ttl))", "ttl"),
        (&renew::SCRIPT, "= ARGV[2 * i - 1], ARGV[2 * i]", "= ARGV[2 * i - 1], ARGV[2 * i] + 1000"),
        (&adopt::SCRIPT, "and string.sub(result, 1, 36) == 'lh1 ' .. from then", "then"),
        (&adopt::SCRIPT, "(token <= now or token < micros)", "true"),
        (&adopt::SCRIPT, "(token <= now or token < micros)", "token <= now"),
        (&adopt::SCRIPT, "redis.pcall('ZADD', counter, micros, 't')", "1"),
        (&adopt::SCRIPT, "if asked and asked > left then", "if asked then"),
        (&adopt::SCRIPT, ".. holder .. mark", ".. holder"),
        (&adopt::SCRIPT, "'lh1 ' .. lease .. ' '", "'lh1 ' .. from .. ' '"),
        (&inspect::SCRIPT, "string.format('%.0f', left)", "(left + 1000)"),
        (&inspect::SCRIPT, "redis.pcall('ZCARD', queue)", "redis.pcall('EXISTS', queue)"),
        (&inspect::SCRIPT, "if not result then", "if not result or redis.pcall('DEL', key) == 7 then"),
        (&fenced::WRITE, "if seen == 20 then", "if false then"),
        (&fenced::READ, "if seen == 20 then", "if false then"),
        (&fenced::WRITE, "seen > token", "seen >= token"),
        (&fenced::WRITE, "'token', token, 'value', value", "'value', value, 'token', seen ~= 0 and seen or token"),
        (&fenced::READ, "redis.pcall('HGET', key, 'value')", "redis.pcall('HGET', key, 'token')"),
        (&fenced::READ, "result = bytes or 0", "result = bytes or ''"),
        (&claim::SCRIPT, "not value and not found[2] and", "not value and"),
        (&claim::SCRIPT, "redis.pcall('ZCARD', queue)", "redis.pcall('ZCARD', queue) and 0"),
        (&claim::SCRIPT, "(token and found[1] > token)", "false"),
        (&claim::SCRIPT, "string.sub(micros, 1, 8) * 1024 + carry", "string.sub(micros, 1, 8) * 1024"),
        (&claim::SCRIPT, "'value', string.sub(term, 2))", "'value', term)"),
        (&claim::SCRIPT, "ttl ~= '0' and not value", "not value"),
        (&claim::SCRIPT, "local written = set.ok and redis.pcall('ZADD', counter, micros, 't')", "local written = set.ok and 1"),
        (&claim::SCRIPT, "value or '', found[1], found[2] }", "value or '', '', found[2] }"),
        (&fenced::WRITE, "set = redis.pcall('HDEL', key, 'value')", "set = 1"),
        (&fenced::WRITE, "set = redis.pcall('HDEL', key, 'value')", "set = redis.pcall('DEL', key)"),
        (&fenced::WRITE, "set = redis.pcall('HSET', key, 'token', token)", "set = redis.pcall('EXISTS', key)"),
        (&fenced::WRITE, "if deletes == '-' then", "if false then"),
        (&fenced::WRITE, "and ttl ~= '' then", "and false then"),
        (&fenced::WRITE, "redis.pcall('PEXPIRE', key, ttl)", "redis.pcall('PEXPIRE', key, ttl + 1000)"),
    ];
    assert_found(Subject::Locks, plants);
}

#[test]
fn a_difference_planted_in_a_proposal_is_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        (&vote::PROPOSE, "if proposal > micros then micros = proposal end", ""),
        (&vote::PROPOSE, "if now > micros then micros = now end", ""),
        (&vote::PROPOSE, "'%016.0f', last + 1", "'%016.0f', last"),
        (&vote::PROPOSE, "result = string.sub(value, 38, 53)", "result = proposal"),
        (&vote::PROPOSE, "if value and string.sub(value, 1, 36) == 'lh1 ' .. lease then", "if false then"),
        (&vote::PROPOSE, "redis.pcall('ZADD', counter, micros, 't')", "1"),
        (&vote::PROPOSE, "'PX', ttl)", "'PX', ttl + 1000)"),
        (&vote::PROPOSE, "result = refused\n", "result = nil\n"),
        (&vote::PROPOSE, "not is_usable) then", "false) then"),
        (&vote::PROPOSE, "and since <= now", ""),
        (&vote::PROPOSE, "own .. ' ' .. since", "own .. ' ' .. string.format('%016.0f', now - 40000)"),
        (&vote::PROPOSE, "left > 0", "left > 30"),
        (&vote::PROPOSE, "now > latest", "false"),
        (&vote::PROPOSE, "'LATE ' .. now", "'LATE ' .. latest"),
        (&vote::PROPOSE, "> math.max(now, last) + quarantine * 1000", "> math.huge"),
        (&vote::PROPOSE, "> math.max(now, last) + quarantine * 1000", ">= math.max(now, last) + quarantine * 1000"),
        (&vote::PROPOSE, "> math.max(now, last) + quarantine * 1000", "> now + quarantine * 1000"),
    ];
    assert_found(Subject::Votes, plants);
}

#[test]
fn differences_in_other_vote_scripts_are_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        (&vote::HOLD, "~= 'lh1 ' .. lease then", "== '' then"),
        (&vote::HOLD, "> math.max(now, last) + quarantine * 1000", "> math.huge"),
        (&vote::HOLD, "> math.max(now, last) + quarantine * 1000", ">= math.max(now, last) + quarantine * 1000"),
        (&vote::HOLD, "> math.max(now, last) + quarantine * 1000", "> now + quarantine * 1000"),
        (&vote::HOLD, "value and latest == ''", "value and false"),
        (&vote::HOLD, "value and latest == ''", "value"),
        (&vote::HOLD, "now > latest", "false"),
        (&vote::HOLD, "not value and now > latest", "now > latest"),
        (&vote::HOLD, "token > last and", "false and"),
        (&vote::HOLD, "token > last and", "true and"),
        (&vote::HOLD, "math.max(left, tonumber(ttl))", "tonumber(ttl)"),
        (&vote::HOLD, "math.max(left, tonumber(ttl))", "left"),
        (&vote::HOLD, "written == 1 and", "false and"),
        (&vote::HOLD, "' ' .. token .. ' ' .. holder", "' ' .. now .. ' ' .. holder"),
        (&vote::HOLD, "'PX', ttl)", "'PX', ttl + 1000)"),
        (&vote::HOLD, "result = refused\n", "result = nil\n"),
        (&vote::HOLD, "result = { value }", "result = token"),
        (&release::SCRIPT, "result = refused or result", ""),
        (&release::SCRIPT, "if mark and (result == 0 or type(result) == 'string') then", "if mark and result == 0 then"),
        (&release::SCRIPT, "if mark and (result == 0 or type(result) == 'string') then", "if mark then"),
        (&inspect::SCRIPT, "result = refused or", "result ="),
        (&inspect::SCRIPT, "refused or not is_shared and value", "value or refused"),
    ];
    assert_found(Subject::Votes, plants);
}

#[test]
fn differences_planted_in_shares_are_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        // Ended shares stay, count, or are compared without a shift of the ends.
        (&acquire::SCRIPT, "redis.pcall('ZREM', key, unpack(gone))", "0"),
        (&acquire::SCRIPT, "if shift > 5 or shift < -5 then", "if false then"),
        (&acquire::SCRIPT, "redis.pcall('ZCOUNT', key, '-inf', '(' .. now_ms)", "0"),
        (&acquire::SCRIPT, "if shift > 5 or shift < -5 then", "if shift > 5 then"),
        // A purge by the clock of a client that is ahead.
        (&acquire::SCRIPT, "'(' .. now_ms", "'(' .. (now_ms + 3600000)"),
        (&acquire::SCRIPT, "shift and shift <= 5 and shift >= -5", "true"),
        (&release::SCRIPT, "shift and shift <= 5 and shift >= -5", "true"),
        (&renew::SCRIPT, "if shift > 5 or shift < -5 then", "if false then"),
        (&release::SCRIPT, "if shift > 5 or shift < -5 then", "if false then"),
        // Wrong limits and kinds.
        (&acquire::SCRIPT, "set.used + share.weight <= math.min(share.most, 10000)", "set.used <= math.min(share.most, 10000)"),
        (&acquire::SCRIPT, "if share and share.kind ~= set.kind then", "if false then"),
        (&acquire::SCRIPT, "redis.pcall('ZRANGE', key, over - 1, over - 1, 'WITHSCORES')", "redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')"),
        (&acquire::SCRIPT, "for i = 1, share.weight do", "for i = 1, 1 do"),
        (&acquire::SCRIPT, "for at = 1, count do members", "for at = 1, 1 do members"),
        (&release::SCRIPT, "for at = 2, count do", "for at = 2, 1 do"),
        (&acquire::SCRIPT, "count + held > most then", "count > most then"),
        (&acquire::SCRIPT, "string.find(newest[1], form, 37, true) == 37", "true"),
        (&acquire::SCRIPT, "ends <= own_end", "true"),
        (&release::SCRIPT, "if newest[1] then redis.pcall('PEXPIREAT', key, math.ceil(newest[2]) + 1000) end", ""),
        // A request goes past the queue, or the queue past its order.
        (&acquire::SCRIPT, "and (waiting == 0 or type(waiting) == 'table') then", "then"),
        (&acquire::SCRIPT, "if asked ~= '' and waiting == 0 and", "if asked ~= '' and"),
        (&release::SCRIPT, "if waiting == 0 then", "if true then"),
        (&release::SCRIPT, "if set then fits = shares.fits(share, set) end", "fits = true"),
        (&release::SCRIPT, "if is_alone then break end", ""),
        (&release::SCRIPT, "if not fits then break end", "if not fits then redis.pcall('ZREM', queue, first[1]) end"),
        (&release::SCRIPT, "shares_given, micros = shares_given + 1, string.format('%.0f', micros + 1)", "shares_given = shares_given + 1"),
        // A leave or a release does not serve the queue, or does not hint the first waiter.
        (&release::SCRIPT, "(gone > 0 or not own_lease)", "gone > 0"),
        (&release::SCRIPT, "result, serves = 1, set", "result, serves = 1, false"),
        (&release::SCRIPT, "result, serves = refused or 1, not refused and rest == 0", "result, serves = refused or 1, false"),
        // A renewal touches other shares or shortens an end; min_hold is lost.
        (&renew::SCRIPT, "redis.pcall('ZADD', key, 'XX', 'GT', unpack(shares.members_of(share, id, holder, ends)))", "redis.pcall('ZADD', key, 'XX', unpack(shares.members_of(share, id, holder, ends)))"),
        (&renew::SCRIPT, "math.max(set.ends, ends) + 1000", "ends + 1000"),
        (&renew::SCRIPT, "unpack(shares.members_of(share, id, holder, ends))", "ends, redis.pcall('ZRANGE', key, 0, 0)[1]"),
        (&release::SCRIPT, "if since then rest =", "if false then rest ="),
        (&release::SCRIPT, "if rest > 0 then", "if false then"),
        (&inspect::SCRIPT, "math.ceil(newest[2]) + 1000 - left", "math.ceil(newest[2]) - left"),
        // An upgrade beside a second reader, under an old token, or without the mark of its queue.
        (&convert::SCRIPT, "elseif set.used > 1 then", "elseif false then"),
        (&convert::SCRIPT, "written = redis.pcall('ZADD', counter, micros, 't')", "written = 1"),
        (&convert::SCRIPT, "redis.pcall('ZCARD', queue) ~= 0 and ' +' or ''", "''"),
        (&convert::SCRIPT, "if shift > 5 or shift < -5 then", "if false then"),
        // A downgrade of another lease, without service of the queue, or with a shorter ttl.
        (&convert::SCRIPT, "elseif value and share and string.sub(value, 1, 36) == 'lh1 ' .. from then", "elseif value and share then"),
        (&convert::SCRIPT, "elseif redis.pcall('ZCARD', queue) ~= 0 then", "elseif false then"),
        (&convert::SCRIPT, "if type(left) == 'number' then ttl = math.max(left, ttl) end", ""),
        (&claim::SCRIPT, "and not use_shares().look(key) then", "and false then"),
    ];
    assert_found(Subject::Shares, plants);
}

/// The roll call after a share that its waiter has not confirmed in time.
#[test]
fn differences_planted_in_the_roll_call_of_shares_are_found() {
    #[rustfmt::skip]
    let plants: &[(&Script, &str, &str)] = &[
        // Unconfirmed shares have no mark, or end without a roll call.
        (&release::SCRIPT, "must_confirm and ends - 0.5 or ends", "ends"),
        (&release::SCRIPT, "must_confirm and ends - 0.5 or ends", "ends - 0.5"),
        (&acquire::SCRIPT, "keeps_late and ended[i + 1] % 1 == 0.5", "false"),
        (&acquire::SCRIPT, "keeps_late and ended[i + 1] % 1 == 0.5", "keeps_late and ended[i + 1] % 1 ~= 0"),
        (&release::SCRIPT, "keeps_late and ended[i + 1] % 1 == 0.5", "false"),
        (&renew::SCRIPT, "use_shares().look(key, true)", "use_shares().look(key)"),
        (&acquire::SCRIPT, "or set and set.late then", "then"),
        (&release::SCRIPT, "if waiters[i] ~= entry then", "if true then"),
        // The late share frees its room at once, for too long, or without a mark.
        (&acquire::SCRIPT, "shares.end_late(key, set, is_called, ends)", "shares.end_late(key, set, false)"),
        (&acquire::SCRIPT, "now_ms + 500 - 0.25", "now_ms + 2500 - 0.25"),
        (&release::SCRIPT, "now_ms + 500 - 0.25", "now_ms + 500"),
        (&acquire::SCRIPT, "or set.late or set.called then", "or set.called then"),
        (&acquire::SCRIPT, "(mode ~= '' or share) and waiting ~= 0", "true"),
        (&acquire::SCRIPT, "(mode ~= '' or share) and waiting ~= 0", "mode ~= '' and waiting ~= 0"),
        (&acquire::SCRIPT, "set and shares.roll_call_end(key)", "nil"),
        (&release::SCRIPT, "ARGV[i], false, shares.roll_call_end(key)", "ARGV[i], false, nil"),
        // The queue is deleted before its waiters can reply, or never.
        (&release::SCRIPT, "if silent_place and place >= silent_place then", "if false then"),
        (&release::SCRIPT, "if place >= 4000000000000000 then", "if set and place >= 4000000000000000 then break end if place >= 4000000000000000 then"),
        // A waiter that replies passes one that may still reply, or does not learn for how long it waits for that one.
        (&acquire::SCRIPT, "place >= silent_place then", "place >= 4000000000000000 then"),
        (&acquire::SCRIPT, "set.called = call_ends", ""),
    ];
    assert_found(Subject::RollCalls, plants);
}

/// How many differences all these tests look for at a time. Each thread waits for its server half of the time, and more
/// of them would delay the steps of other histories until nobody knows when keys have expired.
const AT_A_TIME: usize = 3;

static LOOKING: Mutex<usize> = Mutex::new(0);
static FREE: Condvar = Condvar::new();

/// A look for a difference, counted until it is dropped.
struct Look;

impl Look {
    fn begin() -> Self {
        let looking = LOOKING.lock().unwrap();
        let mut looking = FREE.wait_while(looking, |n| *n >= AT_A_TIME).unwrap();
        *looking += 1;
        Self
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        *LOOKING.lock().unwrap() -= 1;
        FREE.notify_one();
    }
}

#[track_caller]
fn assert_found(subject: Subject, plants: &[(&Script, &str, &str)]) {
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let look = || {
        let mut redis = None;
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some((script, from, to)) = plants.get(n) else {
                return;
            };
            let _look = Look::begin();
            let (scripts, begin) = (Scripts::planted(script, from, to), Instant::now());
            // Some differences appear in few histories, so four seeds are tried.
            let mut seeds = (0..4).map(|part| (n + 64 * part) as u8);
            let redis = redis.get_or_insert_with(Redis::start);
            if !seeds.any(|seed| finds_planted(redis, subject, &scripts, seed)) {
                let missed_one = format!("{script:?}: {from:?} as {to:?}");
                missed.lock().unwrap().push(missed_one);
            }
            // `--nocapture` shows the time until each difference is found.
            println!("{from:?} as {to:?}: {:.1?}", begin.elapsed());
        }
    };
    std::thread::scope(|scope| {
        (0..AT_A_TIME).for_each(|_| drop(scope.spawn(look)));
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

#[test]
fn a_difference_planted_in_the_data_check_is_found() {
    let mut redis = Redis::start();
    for (from, to) in [
        ("own ~= run or", ""),
        ("(is_new_connection or not is_usable)", "not is_usable"),
        ("return { now, math.max(left, 0) }", "return { now, 0 }"),
        ("and since <= now", ""),
        (
            "own .. ' ' .. since",
            "run and run .. ' ' .. since or own .. ' ' .. since",
        ),
        ("keeps_data and is_usable", "is_usable"),
    ] {
        let scripts = Scripts::planted_in_data_check(from, to);
        let is_found = finds_planted(&mut redis, Subject::Votes, &scripts, 3);
        assert!(is_found, "not found: {from:?} as {to:?}");
    }
}
