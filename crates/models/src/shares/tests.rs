//! The first tests show that the protocol keeps its promises. Each later test switches a rule off, as a defect of a
//! script or of a client would, and the checker finds steps that break a promise.

use stateright::HasDiscoveries;

use crate::check::check;

use super::{Limits, Mode, Rules, Shares};

const TOGETHER: &str = "valid leases fit together";
const AWAKE: &str = "no waiter sleeps beside room";
const SERVED: &str = "no script leaves room beside the first waiter";
const ORDER: &str = "waiters are served in order";
const TOKENS: &str = "tokens increase";
const ENDS: &str = "each share ends by itself";
const WINDOW: &str = "a window has at most the limit of starts";
const PROMISES: [&str; 7] = [TOGETHER, AWAKE, SERVED, ORDER, TOKENS, ENDS, WINDOW];

const BESIDE: &str = "leases share the key";
const QUEUE: &str = "a second waiter is queued";
const UPGRADED: &str = "a reader has become the writer";
const DOWNGRADED: &str = "a writer has become a reader";
const LATE: &str = "a late waiter joins again";
const ENDED: &str = "a share is held beside an ended one";
const MOVED: &str = "a valid share has moved";

const READERS: [Mode; 3] = [Mode::Reader, Mode::Reader, Mode::Alone];
const PERMITS: [Mode; 3] = [Mode::Permits(1), Mode::Permits(1), Mode::Permits(2)];
const MIXED: [Mode; 3] = [Mode::Permits(1), Mode::Permits(2), Mode::Alone];
const EQUAL: [Mode; 3] = [Mode::Permits(1); 3];

const RULES: Rules = Rules {
    modes: PERMITS,
    limit: 2,
    ttl: 2,
    min_hold: 0,
    fresh: 1,
    confirm: 1,
    poll: 2,
    longest_sleep: 0,
    ahead: 0,
    client_ahead: 0,
    purges: true,
    purges_by_own_clock: true,
    renews_only_its_own: true,
    serves_in_order: true,
    joins_behind_others: true,
    serves_after_release: true,
    serves_after_leave: true,
    hints_after_release: true,
    keeps_min_hold: true,
    shifts_ends: true,
    counts_shares: true,
    upgrades_only_alone: true,
    converts_holders_only: true,
    counts_conversions: true,
    serves_after_downgrade: true,
    new_lease_ids: true,
    valid_from_request: true,
};

/// The rules for models that lose messages. A waiter whose notification is lost asks again later, so it may sleep
/// longer.
const FAULTY: Rules = Rules {
    longest_sleep: 2,
    ..RULES
};

const MOVES: Rules = Rules { ahead: 2, ..RULES };

const MIN_HOLD: Rules = Rules {
    modes: EQUAL,
    min_hold: 3,
    ..RULES
};

const LIMITS: Limits = Limits {
    ticks: 3,
    attempts: [1; 3],
    renewals: 0,
    conversions: 0,
    crashes: 0,
    losses: 0,
    ends: 0,
    moves: 0,
};

/// Visits all states. Expects that the promises hold, and that each property of `reached` has an example.
fn assert_holds(rules: Rules, limits: Limits, reached: &[&str]) {
    let model = Shares { rules, limits };
    let found = check(model, &PROMISES, HasDiscoveries::AnyFailures);
    let broken: Vec<&str> = PROMISES
        .into_iter()
        .filter(|promise| found.contains(promise))
        .collect();
    assert!(broken.is_empty(), "{broken:?}, with {rules:?}");
    for property in reached {
        assert!(found.contains(property), "{property} is never reached");
    }
}

/// Expects that the model can break the promise after this change of the rules.
fn assert_breaks(
    promise: &'static str,
    mut rules: Rules,
    limits: Limits,
    change: impl FnOnce(&mut Rules),
) {
    change(&mut rules);
    let wanted = HasDiscoveries::AnyOf([promise].into());
    let found = check(Shares { rules, limits }, &[promise], wanted);
    assert!(found.contains(promise), "kept: {promise}, with {rules:?}");
}

#[test]
fn readers_and_a_writer_break_no_promise() {
    let rules = Rules {
        modes: READERS,
        ..RULES
    };
    let limits = Limits {
        renewals: 1,
        ends: 1,
        ..LIMITS
    };
    assert_holds(rules, limits, &[BESIDE, QUEUE, LATE]);
}

#[test]
fn permits_break_no_promise() {
    let limits = Limits {
        renewals: 1,
        ends: 1,
        ..LIMITS
    };
    assert_holds(RULES, limits, &[BESIDE, QUEUE, LATE, ENDED]);
}

#[test]
fn permits_and_a_mutex_break_no_promise() {
    let rules = Rules {
        modes: MIXED,
        ..RULES
    };
    let limits = Limits {
        renewals: 1,
        ends: 1,
        ..LIMITS
    };
    assert_holds(rules, limits, &[QUEUE, LATE]);
}

#[test]
fn crashes_break_no_promise() {
    for modes in [READERS, PERMITS, MIXED] {
        let rules = Rules { modes, ..RULES };
        let limits = Limits {
            renewals: 1,
            crashes: 1,
            ..LIMITS
        };
        assert_holds(rules, limits, &[QUEUE, LATE]);
    }
}

#[test]
fn lost_messages_break_no_promise() {
    for modes in [READERS, PERMITS, MIXED] {
        let rules = Rules { modes, ..FAULTY };
        let limits = Limits {
            losses: 1,
            ends: 1,
            ..LIMITS
        };
        assert_holds(rules, limits, &[QUEUE]);
    }
}

#[test]
fn repeated_attempts_break_no_promise() {
    let limits = Limits {
        ticks: 2,
        attempts: [2, 1, 1],
        ends: 1,
        ..LIMITS
    };
    for modes in [READERS, PERMITS, MIXED] {
        assert_holds(Rules { modes, ..RULES }, limits, &[QUEUE]);
    }
}

#[test]
fn moved_slots_break_no_promise() {
    for modes in [READERS, PERMITS, MIXED] {
        let rules = Rules { modes, ..MOVES };
        let limits = Limits {
            moves: 1,
            renewals: 1,
            ..LIMITS
        };
        assert_holds(rules, limits, &[QUEUE, MOVED]);
    }
}

/// The third client is a writer, and the others are readers.
const CONVERSIONS: Rules = Rules {
    modes: READERS,
    ..RULES
};

#[test]
fn conversions_break_no_promise() {
    for limits in [
        Limits {
            conversions: 2,
            ..LIMITS
        },
        Limits {
            conversions: 1,
            ends: 1,
            ..LIMITS
        },
        Limits {
            conversions: 1,
            renewals: 1,
            ..LIMITS
        },
    ] {
        assert_holds(CONVERSIONS, limits, &[BESIDE, QUEUE, UPGRADED, DOWNGRADED]);
    }
    let rules = Rules {
        modes: READERS,
        ..FAULTY
    };
    let limits = Limits {
        ticks: 2,
        conversions: 1,
        losses: 1,
        ..LIMITS
    };
    assert_holds(rules, limits, &[QUEUE, UPGRADED, DOWNGRADED]);
}

#[test]
fn an_upgrade_beside_a_second_reader_is_not_alone() {
    let limits = Limits {
        conversions: 1,
        ..LIMITS
    };
    assert_breaks(TOGETHER, CONVERSIONS, limits, |rules| {
        rules.upgrades_only_alone = false
    });
}

#[test]
fn a_conversion_of_an_ended_lease_admits_too_many() {
    let limits = Limits {
        conversions: 1,
        ..LIMITS
    };
    assert_breaks(TOGETHER, CONVERSIONS, limits, |rules| {
        rules.converts_holders_only = false
    });
}

#[test]
fn a_conversion_under_the_old_token_gives_it_twice() {
    let limits = Limits {
        conversions: 1,
        ..LIMITS
    };
    assert_breaks(TOKENS, CONVERSIONS, limits, |rules| {
        rules.counts_conversions = false
    });
}

#[test]
fn a_downgrade_that_serves_no_reader_leaves_it_beside_room() {
    let limits = Limits {
        conversions: 1,
        ..LIMITS
    };
    assert_breaks(SERVED, CONVERSIONS, limits, |rules| {
        rules.serves_after_downgrade = false
    });
}

#[test]
fn min_hold_breaks_no_promise() {
    let limits = Limits {
        attempts: [2, 1, 1],
        ..LIMITS
    };
    assert_holds(MIN_HOLD, limits, &[BESIDE, QUEUE]);
    let with_crash = Limits {
        crashes: 1,
        ..LIMITS
    };
    assert_holds(MIN_HOLD, with_crash, &[BESIDE]);
}

#[test]
fn without_the_purge_a_waiter_sleeps_beside_room() {
    let limits = Limits {
        ticks: 4,
        renewals: 1,
        ..LIMITS
    };
    let (modes, poll) = (EQUAL, 1);
    let rules = Rules {
        modes,
        poll,
        ..RULES
    };
    assert_breaks(AWAKE, rules, limits, |rules| rules.purges = false);
}

#[test]
fn a_purge_by_the_clients_clock_admits_too_many() {
    assert_breaks(
        TOGETHER,
        Rules {
            client_ahead: 2,
            ..RULES
        },
        LIMITS,
        |rules| {
            rules.purges_by_own_clock = false;
        },
    );
}

#[test]
fn a_renewal_of_all_shares_keeps_those_of_the_dead() {
    let limits = Limits {
        renewals: 1,
        crashes: 1,
        ..LIMITS
    };
    assert_breaks(ENDS, RULES, limits, |rules| {
        rules.renews_only_its_own = false
    });
}

#[test]
fn small_requests_would_overtake_a_big_one() {
    assert_breaks(ORDER, RULES, LIMITS, |rules| rules.serves_in_order = false);
    assert_breaks(ORDER, RULES, LIMITS, |rules| {
        rules.joins_behind_others = false
    });
}

#[test]
fn a_forgotten_serve_leaves_a_waiter_beside_room() {
    assert_breaks(SERVED, RULES, LIMITS, |rules| {
        rules.serves_after_release = false
    });
    let leaves = Limits { ends: 1, ..LIMITS };
    assert_breaks(SERVED, RULES, leaves, |rules| {
        rules.serves_after_leave = false
    });
}

#[test]
fn without_a_hint_a_waiter_sleeps_until_it_asks_again() {
    let limits = Limits {
        renewals: 1,
        ..LIMITS
    };
    assert_breaks(AWAKE, RULES, limits, |rules| {
        rules.hints_after_release = false
    });
}

#[test]
fn a_lost_min_hold_lets_too_many_start() {
    let limits = Limits {
        attempts: [2, 1, 1],
        ..LIMITS
    };
    assert_breaks(WINDOW, MIN_HOLD, limits, |rules| {
        rules.keeps_min_hold = false
    });
}

#[test]
fn ends_that_do_not_move_end_too_early_or_too_late() {
    let limits = Limits { moves: 1, ..LIMITS };
    for promise in [TOGETHER, ENDS] {
        assert_breaks(promise, MOVES, limits, |rules| rules.shifts_ends = false);
    }
}

#[test]
fn a_share_that_is_not_counted_gives_its_token_twice() {
    assert_breaks(
        TOKENS,
        Rules {
            modes: READERS,
            ..RULES
        },
        LIMITS,
        |rules| {
            rules.counts_shares = false;
        },
    );
}

#[test]
fn a_reused_lease_id_admits_too_many() {
    let limits = Limits {
        attempts: [2, 1, 1],
        ends: 1,
        ..LIMITS
    };
    let rules = Rules {
        modes: MIXED,
        ..RULES
    };
    assert_breaks(TOGETHER, rules, limits, |rules| rules.new_lease_ids = false);
}

#[test]
fn a_validity_from_the_reply_on_is_too_long() {
    assert_breaks(TOGETHER, RULES, LIMITS, |rules| {
        rules.valid_from_request = false
    });
}
