//! The memory store against a real Redis: the same histories of commands, the same replies, the same
//! values, the same news. And the proof that this finds differences: some are planted in the scripts.

mod histories;
mod server;
mod watching;

use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::store::script::Kind;

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
        (Kind::Acquire, "if last and not refused and last >= micros then", "if false then"),
        (Kind::Acquire, "'NX', 'PX', ttl", "'PX', ttl"),
        (Kind::Acquire, "stands ~= '-' and redis.pcall('SET'", "redis.pcall('SET'"),
        (Kind::Acquire, "if string.sub(held, 5, 36) == lease then", "if false then"),
        (Kind::Acquire, "if stands == '' or type(left) ~= 'number' then return left end", ""),
        (Kind::Acquire, "if not string.find(held, lease, 55, true) then", "if true then"),
        (Kind::Acquire, "if stands == '-' or #held > 8192", "if #held > 8192"),
        (Kind::Acquire, "' ' .. lease .. ',' .. stands", "' ' .. lease .. ',' .. ttl"),
        (Kind::Acquire, "return -1 - left", "return left"),
        (Kind::Release, "if set.err then return false end", "if set.ok then return false end"),
        (Kind::Release, "local listening = polls or", "local listening = true or"),
        (Kind::Release, "if listening ~= 0 then", "if true then"),
        (Kind::Release, "string.sub(value, behind)", "''"),
        (Kind::Release, "polls and 100 or ttl", "ttl == '0' and 30000 or ttl"),
        (Kind::Release, "if string.sub(lease, 33, 33) == '!' then", "if false then"),
        (Kind::Release, "lease .. ' ' .. by .. ' ' .. key", "lease .. ' ' .. key"),
        (Kind::Release, "string.sub(result, 1, first - 1) .. string.sub(result, behind)", "string.sub(result, 1, first - 1)"),
        (Kind::Release, ", 'KEEPTTL'", ", 'PX', 60000"),
        (Kind::Release, "line and pass_on(key, result, line) and 1 or", ""),
        (Kind::Release, "'lh1 ' .. lease then", "'lh1 ' .. lease or true then"),
        (Kind::Renew, "~= 'lh1 ' .. lease then", "== '' then"),
        (Kind::Renew, "local shorter = result < tonumber(ttl)", "local shorter = true"),
        (Kind::Renew, "= ARGV[2 * i - 1], ARGV[2 * i]", "= ARGV[2 * i - 1], ARGV[2 * i] + 1000"),
        (Kind::Adopt, "if string.sub(result, 1, 36) == 'lh1 ' .. from then", "if true then"),
        (Kind::Adopt, "if micros ~= token then", "if not micros then"),
        (Kind::Adopt, "if asked and asked > left then", "if asked then"),
        (Kind::Adopt, ".. holder .. line", ".. holder"),
        (Kind::Adopt, "'lh1 ' .. lease .. ' '", "'lh1 ' .. from .. ' '"),
        (Kind::Inspect, "string.format('%.0f', left)", "(left + 1000)"),
        (Kind::Inspect, "if not result then", "if not result or redis.pcall('DEL', key) == 7 then"),
        (Kind::Write, "seen > token", "seen >= token"),
        (Kind::Write, "'token', token, 'value', value", "'value', value, 'token', seen ~= 0 and seen or token"),
        (Kind::Read, "redis.pcall('HGET', key, 'value') or ''", "redis.pcall('HGET', key, 'token') or ''"),
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
