//! The memory store against a real Redis: the same histories of commands, the same replies, the same
//! values, the same news. And the proof that this finds differences: some are planted in the scripts.

mod histories;
mod server;
mod watching;

use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::store::redis::scripts::Kind;

use histories::{Operation, histories};
use server::{Redis, Scripts};

/// Runs generated histories on both until one differs; says how.
fn differs(scripts: &Scripts, cases: u32, seed: u8) -> Option<String> {
    let redis = std::cell::RefCell::new(Redis::start());
    let config = Config {
        cases,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&histories(), |history: Vec<Operation>| {
        let compared = redis.borrow_mut().compare(scripts, &history);
        compared.map_err(TestCaseError::fail)
    });
    match result {
        Ok(()) => None,
        Err(TestError::Fail(how, history)) => Some(format!("{how}\n{history:#?}")),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

#[test]
fn the_memory_store_answers_as_redis_does() {
    if let Some(how) = differs(&Scripts::real(), 250, 1) {
        panic!("{how}");
    }
}

#[test]
fn a_difference_planted_in_any_script_is_found() {
    #[rustfmt::skip]
    let plants: &[(Kind, &str, &str)] = &[
        (Kind::Acquire, "elseif last and last >= micros then", "elseif false then"),
        (Kind::Release, "elseif last and last >= micros then", "elseif false then"),
        (Kind::Acquire, "refused or redis.pcall('SET', key, value, 'NX', 'PX', ttl)", "refused or redis.pcall('SET', key, value, 'PX', ttl)"),
        (Kind::Acquire, "queue and (mode == '-' or mode == '-+' or waiting ~= 0)", "queue and waiting ~= 0"),
        (Kind::Acquire, "queue and (mode == '-' or mode == '-+' or waiting ~= 0)", "mode == '-' or mode == '-+'"),
        (Kind::Acquire, "mode == '-' or mode == '-+' or", "mode == '-' or"),
        (Kind::Acquire, "if held and string.sub(held, 5, 36) == lease then", "if false then"),
        (Kind::Acquire, "if mode == '' or type(left) ~= 'number' then return left end", ""),
        (Kind::Acquire, "lease .. ',' .. (kind == '0' and 0 or ttl) .. ',' .. holder", "lease .. ',' .. ttl .. ',' .. holder"),
        (Kind::Acquire, "if is_told then redis.pcall('ZREM', queue, polls) else entry = polls end", ""),
        (Kind::Acquire, "place and mode == '-+' and", "place and"),
        (Kind::Acquire, "if is_told then redis.pcall('ZREM', queue, polls) else", "if not is_told then"),
        (Kind::Acquire, "if type(place) ~= 'string' or #place > 16 or string.find(place, '%D') then return left end", ""),
        (Kind::Acquire, "held and not string.find(held, ' ', 55, true) and", "false and"),
        (Kind::Acquire, "waiting == 0 or redis.pcall('ZCOUNT', queue, now, 'inf') == 0", "false"),
        (Kind::Acquire, "if comes_last and added == 1 then", "if comes_last then"),
        (Kind::Acquire, "if comes_last and added == 1 then", "if added == 1 then"),
        (Kind::Acquire, "    ahead = nil\n", ""),
        (Kind::Acquire, "place = string.sub(mode, 2)", "place = ''"),
        (Kind::Acquire, "if served == lease then return micros end", ""),
        (Kind::Acquire, "left = in_queue and served and redis.pcall('PTTL', key) or 0", ""),
        (Kind::Acquire, "return { left, ahead, tonumber(place) }", "return { left, ahead + 1, tonumber(place) }"),
        (Kind::Acquire, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (Kind::Acquire, "'GETRANGE', counter, '0', '16'", "'GETRANGE', counter, '0', '14'"),
        (Kind::Acquire, "if exists ~= 1 then", "if false then"),
        (Kind::Acquire, "#value > 255 or", "#value > 60 or"),
        (Kind::Acquire, "#place > 16 or", "#place > 15 or"),
        (Kind::Acquire, "ttl = own_ttl", "ttl = polls and 100 or asked"),
        (Kind::Release, "ttl = was_late and 1000 or 100", "ttl = 30000"),
        (Kind::Release, "ttl = was_late and 1000 or 100", "ttl = 100"),
        (Kind::Release, "ms > 500 and now - first[2] >", "now - first[2] < 0 and now - first[2] >"),
        (Kind::Release, "now - first[2] > 1000 * math.min(ms / 3, 1000)", "true"),
        (Kind::Release, "not was_late and", ""),
        (Kind::Release, "ms / 4", "ms / 2"),
        (Kind::Release, ", 2000), '?'", ", 20000), '?'"),
        (Kind::Release, ", 2000), '?'", ", 2000), ''"),
        (Kind::Release, "if listeners ~= 0 then", "if true then"),
        (Kind::Release, "gone = gone + 1", "gone = 1"),
        (Kind::Release, "if type(waiting) == 'number' and waiting > 8 - gone then", "if false then"),
        (Kind::Release, "local listeners = is_own or polls or", "local listeners = true or"),
        (Kind::Release, "waiting ~= 0 and ' +' or ''", "''"),
        (Kind::Release, "redis.pcall('ZPOPMIN', queue)", "redis.pcall('ZPOPMAX', queue)"),
        (Kind::Release, "while gone < 10000 do", "while gone < 1 do"),
        (Kind::Release, "#first[1] <= 256 and", "#first[1] <= 40 and"),
        (Kind::Release, "asked >= '1'", "asked >= '3'"),
        (Kind::Release, "ms <= 86400000", "ms < 90000"),
        (Kind::Release, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (Kind::Release, "if after and string.sub(after, 1, 1) == '!' then", "if false then"),
        (Kind::Release, "string.sub(lease, 1, 16) .. ' ' .. after .. ' ' .. key", "string.sub(lease, 1, 16) .. ' ' .. key"),
        (Kind::Release, "string.sub(lease, 1, 16) .. ' ' .. after", "lease .. ' ' .. after"),
        (Kind::Release, "if string.find(result, ' ', 55, true) then", "if false then"),
        (Kind::Release, "ARGV[i], lease .. ',0,' .. holder)", "ARGV[i])"),
        (Kind::Release, "ARGV[i], lease .. ',0,' .. holder)", "lease .. ',0,' .. holder)"),
        (Kind::Release, "== 'lh1 ' .. lease then", "== 'lh1 ' .. lease or result then"),
        (Kind::Renew, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '34'"),
        (Kind::Adopt, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (Kind::Inspect, "'GETRANGE', key, '0', '255'", "'GETRANGE', key, '0', '60'"),
        (Kind::Inspect, "#value > 255 or", "#value > 60 or"),
        (Kind::Renew, "~= 'lh1 ' .. lease then", "== '' then"),
        (Kind::Renew, "if result < tonumber(ttl) then", "if true then"),
        (Kind::Renew, "= ARGV[2 * i - 1], ARGV[2 * i]", "= ARGV[2 * i - 1], ARGV[2 * i] + 1000"),
        (Kind::Adopt, "if string.sub(result, 1, 36) == 'lh1 ' .. from then", "if true then"),
        (Kind::Adopt, "if micros == token then", "if micros then"),
        (Kind::Adopt, "if asked and asked > left then", "if asked then"),
        (Kind::Adopt, ".. holder .. mark", ".. holder"),
        (Kind::Adopt, "'lh1 ' .. lease .. ' '", "'lh1 ' .. from .. ' '"),
        (Kind::Inspect, "string.format('%.0f', left)", "(left + 1000)"),
        (Kind::Inspect, "redis.pcall('ZCARD', queue)", "redis.pcall('EXISTS', queue)"),
        (Kind::Inspect, "if not result then", "if not result or redis.pcall('DEL', key) == 7 then"),
        (Kind::Acquire, "string.find(place, '%D')", "string.find(place, '%d')"),
        (Kind::Write, "if seen == 20 then", "if false then"),
        (Kind::Read, "if seen == 20 then", "if false then"),
        (Kind::Write, "seen > token", "seen >= token"),
        (Kind::Write, "'token', token, 'value', value", "'value', value, 'token', seen ~= 0 and seen or token"),
        (Kind::Read, "redis.pcall('HGET', key, 'value') or 0", "redis.pcall('HGET', key, 'token') or 0"),
        (Kind::Read, "redis.pcall('HGET', key, 'value') or 0", "redis.pcall('HGET', key, 'value') or ''"),
        (Kind::Write, "set = redis.pcall('HDEL', key, 'value')", "set = 1"),
        (Kind::Write, "set = redis.pcall('HDEL', key, 'value')", "set = redis.pcall('DEL', key)"),
        (Kind::Write, "set = redis.pcall('HSET', key, 'token', token)", "set = redis.pcall('EXISTS', key)"),
        (Kind::Write, "if deletes == '-' then", "if false then"),
        (Kind::Write, "and ttl ~= '' then", "and false then"),
        (Kind::Write, "redis.pcall('PEXPIRE', key, ttl)", "redis.pcall('PEXPIRE', key, ttl + 1000)"),
    ];
    let mut missed = Vec::new();
    for (n, (kind, from, to)) in plants.iter().enumerate() {
        let scripts = Scripts::planted(*kind, from, to);
        if differs(&scripts, 400, n as u8).is_none() {
            missed.push(format!("{kind:?}: {from:?} as {to:?}"));
        }
    }
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

/// Longest that a history waits for keys to expire.
const LONGEST_PAUSE: Duration = Duration::from_millis(60);
