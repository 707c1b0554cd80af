//! The tests of the first half show that the protocol keeps both promises within its bounds. Each test of the second
//! half removes a rule or a bound, and the checker finds a way to break a promise.

use stateright::HasDiscoveries;

use crate::check::check;

use super::{Limits, NODES, Quorum, Rules, UNITS_PER_TICK};

const EXCLUSION: &str = "no two valid leases overlap";
const ORDER: &str = "tokens increase";
const ONE_ROUND_TRIP: &str = "grant in one round trip";
const WRITE_BACK: &str = "grant after a write-back";
const SECOND_GRANT: &str = "second grant";

/// The protocol, with each bound as wide as it may be. The clocks use the whole drift. With half a tick more of lead,
/// the lead and the difference between clocks together would be as long as the quarantine.
const RULES: Rules = Rules {
    ttl: 2,
    drift: 1,
    clock_offset: 1,
    quarantine: 2,
    lead: UNITS_PER_TICK / 2,
    majority: NODES / 2 + 1,
    renewal_majority: NODES / 2 + 1,
    writes_back: true,
    stores_under_lease: true,
    new_lease_ids: true,
    separate_replies: true,
    valid_from_request: true,
};

/// With equal clocks, which need no drift, a lease is valid for two ticks: long enough for a renewal.
const EQUAL_CLOCKS: Rules = Rules {
    drift: 0,
    clock_offset: 0,
    lead: 0,
    ..RULES
};

const LIMITS: Limits = Limits {
    ticks: 2,
    attempts: [1, 1],
    renewals: 0,
    restarts: 0,
    clock_steps: 0,
    late_requests: 0,
};

const RESTART: Limits = Limits {
    restarts: 1,
    ..LIMITS
};

const CLOCK_STEP: Limits = Limits {
    clock_steps: 1,
    ..LIMITS
};

const RESTART_AND_CLOCK_STEP: Limits = Limits {
    restarts: 1,
    ..CLOCK_STEP
};

const RENEWAL: Limits = Limits {
    renewals: 1,
    ..LIMITS
};

/// Visits all states, and expects examples of `reached` and of no broken promise.
fn assert_holds(rules: Rules, limits: Limits, reached: &[&str]) {
    let found = check(
        Quorum { rules, limits },
        &[EXCLUSION, ORDER],
        HasDiscoveries::AnyFailures,
    );
    let broken = [EXCLUSION, ORDER].map(|property| found.contains(property));
    assert_eq!(broken, [false; 2], "{rules:?}");
    for property in [ONE_ROUND_TRIP, SECOND_GRANT].iter().chain(reached) {
        assert!(found.contains(property), "{property} is never reached");
    }
}

/// Expects that the promise can be broken after this change of the rules.
fn assert_breaks(
    promise: &'static str,
    mut rules: Rules,
    limits: Limits,
    change: impl FnOnce(&mut Rules),
) {
    change(&mut rules);
    let wanted = HasDiscoveries::AnyOf([promise].into());
    let found = check(Quorum { rules, limits }, &[promise], wanted);
    assert!(found.contains(promise), "kept: {promise}, with {rules:?}");
}

#[test]
fn late_requests_break_no_promise() {
    let limits = Limits {
        late_requests: 1,
        ..LIMITS
    };
    assert_holds(RULES, limits, &[WRITE_BACK]);
}

#[test]
fn restarts_and_clock_steps_break_no_promise() {
    let reached = [WRITE_BACK, "vote after a quarantine"];
    assert_holds(RULES, RESTART_AND_CLOCK_STEP, &reached);
}

#[test]
fn repeated_attempts_break_no_promise() {
    let at_once = Limits {
        ticks: 0,
        attempts: [2, 1],
        ..LIMITS
    };
    assert_holds(RULES, at_once, &[WRITE_BACK]);
    let late = Limits {
        late_requests: 1,
        ..at_once
    };
    assert_holds(EQUAL_CLOCKS, late, &[WRITE_BACK]);
    let slowly = Limits {
        ticks: 2,
        ..at_once
    };
    assert_holds(EQUAL_CLOCKS, slowly, &[WRITE_BACK]);
}

#[test]
fn renewals_break_no_promise() {
    let limits = Limits {
        renewals: 1,
        ..RESTART
    };
    assert_holds(EQUAL_CLOCKS, limits, &["renewal"]);
}

#[test]
fn one_node_of_three_cannot_grant() {
    for promise in [EXCLUSION, ORDER] {
        assert_breaks(promise, RULES, LIMITS, |rules| rules.majority = NODES / 2);
    }
}

#[test]
fn one_node_of_three_cannot_renew() {
    assert_breaks(EXCLUSION, EQUAL_CLOCKS, RENEWAL, |rules| {
        rules.renewal_majority = NODES / 2;
    });
}

#[test]
fn a_reply_to_the_acquire_renews_nothing() {
    assert_breaks(EXCLUSION, EQUAL_CLOCKS, RENEWAL, |rules| {
        rules.separate_replies = false;
    });
}

#[test]
fn without_the_write_back_a_later_token_is_smaller() {
    assert_breaks(ORDER, RULES, LIMITS, |rules| rules.writes_back = false);
}

#[test]
fn a_write_back_under_another_lease_does_not_count() {
    assert_breaks(ORDER, RULES, LIMITS, |rules| {
        rules.stores_under_lease = false;
    });
}

#[test]
fn without_the_quarantine_leases_overlap() {
    assert_breaks(EXCLUSION, RULES, RESTART, |rules| rules.quarantine = 0);
}

#[test]
fn a_quarantine_shorter_than_the_ttl_is_too_short() {
    assert_breaks(EXCLUSION, RULES, RESTART_AND_CLOCK_STEP, |rules| {
        rules.quarantine = rules.ttl - 1;
    });
}

#[test]
fn clocks_that_step_beyond_the_drift_let_leases_overlap() {
    assert_breaks(EXCLUSION, RULES, CLOCK_STEP, |rules| {
        rules.clock_offset = rules.drift + 1;
    });
}

#[test]
fn clocks_that_differ_by_the_quarantine_let_tokens_decrease() {
    assert_breaks(ORDER, RULES, RESTART, |rules| {
        rules.clock_offset = rules.quarantine;
    });
}

#[test]
fn a_proposal_too_far_ahead_lets_tokens_decrease() {
    assert_breaks(ORDER, RULES, RESTART, |rules| {
        rules.lead = (rules.quarantine - rules.clock_offset) * UNITS_PER_TICK;
    });
}

#[test]
fn a_validity_from_the_replies_on_is_too_long() {
    assert_breaks(EXCLUSION, EQUAL_CLOCKS, LIMITS, |rules| {
        rules.valid_from_request = false;
    });
}

#[test]
fn a_reused_lease_id_lets_leases_overlap() {
    let limits = Limits {
        ticks: 0,
        attempts: [2, 1],
        late_requests: 1,
        ..LIMITS
    };
    assert_breaks(EXCLUSION, EQUAL_CLOCKS, limits, |rules| {
        rules.new_lease_ids = false;
    });
}
