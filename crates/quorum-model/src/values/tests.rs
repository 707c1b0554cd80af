//! The tests of the first half show that the protocol keeps its promise within its bounds. Each test of the second half
//! removes a rule or a bound, and the checker finds a way to break the promise.

use stateright::HasDiscoveries;

use super::{CALLS, FencedValue, Kind, Limits, Losses, NODES, Rules, START, Tick};
use crate::check::check;

const ORDER: &str = "versions rise";
const READ: &str = "a value is read";
const WRITTEN: &str = "a write is accepted";
const REFUSED: &str = "a write is refused";
const WRITE_BACK: &str = "a read writes back";
const GIVEN_BACK: &str = "a node gets its copy back";
const OLD_COPY: &str = "a node has an old copy";
const SECOND_LOSS: &str = "a second loss";
const LATE_WRITE: &str = "a late write";
const LATER_TOKEN: &str = "a lost copy does not count";

const QUARANTINE: Tick = 3;

/// The protocol, with each bound as wide as it may be.
const RULES: Rules = Rules {
    majority: NODES / 2 + 1,
    quarantine: QUARANTINE,
    longest_call: (QUARANTINE - 1) / 2,
    ahead: QUARANTINE,
    newest_lost: QUARANTINE,
    reads_write_back: true,
    refusals_read: true,
    checks_mark: true,
    counts_kept_only: true,
    checks_copies: true,
    losses: Losses::WithCallBetween,
};

const LIMITS: Limits = Limits {
    calls: [None; CALLS],
    ticks: 0,
    losses: 0,
    late_writes: 0,
};

/// A node that loses its data at [`START`] can have lost these tokens.
const LOW: Option<Kind> = Some(Kind::Write(START + QUARANTINE - 1));
const HIGH: Option<Kind> = Some(Kind::Write(START + QUARANTINE));
/// No node stores this token at [`START`].
const LATER: Option<Kind> = Some(Kind::Write(START + QUARANTINE + 1));
const READING: Option<Kind> = Some(Kind::Read);

/// A loss of data, and the time until the node replies again.
const LOSS: Limits = Limits {
    ticks: QUARANTINE,
    losses: 1,
    ..LIMITS
};

const TWO_LOSSES: Limits = Limits {
    ticks: 2 * QUARANTINE,
    losses: 2,
    ..LIMITS
};

/// Visits all states, and expects examples of `reached` and no broken promise.
fn assert_holds(limits: Limits, reached: &[&str]) {
    let model = FencedValue {
        rules: RULES,
        limits,
    };
    let found = check(model, &[ORDER], HasDiscoveries::AnyFailures);
    assert!(!found.contains(ORDER), "broken: {ORDER}");
    for property in reached {
        assert!(found.contains(property), "{property} is never reached");
    }
}

/// Expects that the promise can be broken after this change of the rules.
fn assert_breaks(limits: Limits, change: impl FnOnce(&mut Rules)) {
    let mut rules = RULES;
    change(&mut rules);
    let model = FencedValue { rules, limits };
    let wanted = HasDiscoveries::AnyOf([ORDER].into());
    let found = check(model, &[ORDER], wanted);
    assert!(found.contains(ORDER), "kept, with {rules:?}");
}

#[test]
fn overlapping_calls_break_no_promise() {
    let limits = Limits {
        calls: [LOW, READING, READING, None],
        ..LIMITS
    };
    assert_holds(limits, &[READ, WRITTEN, WRITE_BACK]);
}

#[test]
fn two_writes_of_one_token_break_no_promise() {
    let limits = Limits {
        calls: [LOW, LOW, READING, None],
        ..LIMITS
    };
    assert_holds(limits, &[READ, WRITTEN, WRITE_BACK]);
}

#[test]
fn late_writes_break_no_promise() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, None],
        late_writes: 1,
        ..LIMITS
    };
    let reached = [READ, WRITTEN, REFUSED, WRITE_BACK, LATE_WRITE];
    assert_holds(limits, &reached);
}

#[test]
fn a_loss_of_data_breaks_no_promise() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, None],
        ..LOSS
    };
    let reached = [READ, WRITTEN, REFUSED, WRITE_BACK, GIVEN_BACK, OLD_COPY];
    assert_holds(limits, &reached);
}

#[test]
fn a_later_token_than_the_lost_ones_breaks_no_promise() {
    let limits = Limits {
        calls: [HIGH, LATER, READING, None],
        ..LOSS
    };
    assert_holds(limits, &[READ, WRITTEN, REFUSED, GIVEN_BACK, LATER_TOKEN]);
}

#[test]
fn losses_between_calls_break_no_promise() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, None],
        ..TWO_LOSSES
    };
    assert_holds(limits, &[READ, WRITTEN, REFUSED, GIVEN_BACK, SECOND_LOSS]);
}

#[test]
#[ignore = "visits six million states, which takes a minute"]
fn late_writes_after_a_loss_break_no_promise() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, None],
        late_writes: 1,
        ..LOSS
    };
    assert_holds(limits, &[READ, WRITTEN, REFUSED, GIVEN_BACK, LATE_WRITE]);
}

#[test]
fn one_node_of_three_cannot_accept() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, None],
        ..LIMITS
    };
    assert_breaks(limits, |rules| rules.majority = NODES / 2);
}

#[test]
fn without_the_write_back_a_later_read_returns_an_older_version() {
    let limits = Limits {
        calls: [LOW, HIGH, READING, READING],
        ..LIMITS
    };
    assert_breaks(limits, |rules| rules.reads_write_back = false);
}

#[test]
fn a_refusal_without_a_read_lets_a_smaller_token_in() {
    let limits = Limits {
        calls: [LOW, LOW, HIGH, None],
        ..LIMITS
    };
    assert_breaks(limits, |rules| rules.refusals_read = false);
}

#[test]
fn a_node_that_ignores_its_mark_keeps_an_older_version() {
    let limits = Limits {
        calls: [READING, HIGH, LOW, None],
        late_writes: 1,
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.checks_mark = false);
}

#[test]
fn a_missing_copy_does_not_count() {
    let limits = Limits {
        calls: [LOW, READING, None, None],
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.counts_kept_only = false);
}

#[test]
fn a_copy_from_before_a_loss_does_not_count() {
    let limits = Limits {
        calls: [READING, LOW, HIGH, None],
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.checks_copies = false);
}

#[test]
fn a_token_that_may_be_lost_is_not_later() {
    let limits = Limits {
        calls: [HIGH, HIGH, None, None],
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.newest_lost = QUARANTINE - 1);
}

#[test]
fn tokens_ahead_by_more_than_a_quarantine_may_be_lost() {
    let limits = Limits {
        calls: [LATER, LATER, None, None],
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.ahead = QUARANTINE + 1);
}

#[test]
fn calls_of_half_a_quarantine_take_too_long() {
    let limits = Limits {
        calls: [READING, LOW, HIGH, None],
        ticks: 2,
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.quarantine = 2 * rules.longest_call);
}

#[test]
fn without_the_quarantine_a_read_misses_a_write() {
    let limits = Limits {
        calls: [READING, LOW, HIGH, None],
        ticks: 0,
        ..LOSS
    };
    assert_breaks(limits, |rules| rules.quarantine = 0);
}

#[test]
fn two_losses_need_a_call_between_them() {
    let limits = Limits {
        calls: [LOW, READING, None, None],
        ..TWO_LOSSES
    };
    assert_breaks(limits, |rules| rules.losses = Losses::Apart);
}

#[test]
fn a_call_soon_after_a_loss_may_miss_a_write() {
    let limits = Limits {
        calls: [READING, LOW, HIGH, None],
        ..TWO_LOSSES
    };
    assert_breaks(limits, |rules| rules.losses = Losses::WithEarlyCall);
}
