//! Wrong books are found, and described correctly.

use leasehold_testbed::Server;
use leasehold_tools::environment::Namespace;

use super::*;

/// A market on which one of three items was sold for 10.
fn stock() -> Stock {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Stock {
        funds: vec![("seller".into(), 10), ("buyer".into(), 90)],
        offered: names(&["b"]),
        unlisted: vec![("seller".into(), names(&["c"]))],
        bought: vec![("buyer".into(), names(&["a"]))],
        locks: Vec::new(),
    }
}

fn books() -> Books {
    Books {
        funds: 100,
        items: 3,
        offered: 1,
        bought: 1,
    }
}

/// The errors that are found after `change`.
fn wrong(change: impl FnOnce(&mut Stock)) -> String {
    let mut stock = stock();
    change(&mut stock);
    match stock.check(&books()) {
        Ok(()) => "nothing".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn finds(change: impl FnOnce(&mut Stock), words: &str) {
    let found = wrong(change);
    assert!(
        found.contains(words),
        "{found:?} does not contain {words:?}"
    );
}

#[test]
fn a_correct_market_passes() {
    assert_eq!(wrong(|_| ()), "nothing");
}

#[test]
fn wrong_amounts_of_money_are_reported() {
    finds(|stock| stock.funds[0].1 -= 3, "3 of money is missing");
    finds(
        |stock| stock.funds[1].1 += 4,
        "4 of money was made out of nothing",
    );
    finds(
        |stock| {
            stock.funds[0].1 = 101;
            stock.funds[1].1 = -1;
        },
        "buyer spent 1 more than it had",
    );
}

#[test]
fn a_duplicated_item_is_reported() {
    finds(
        |stock| stock.offered.push("a".to_owned()),
        "1 items are in two places, the first is a, with buyer and with the market",
    );
    finds(
        |stock| stock.bought[0].1.push("c".to_owned()),
        "1 items are in two places, the first is c, with seller and with buyer",
    );
    let other = ("other".to_owned(), vec!["a".to_owned()]);
    finds(
        |stock| stock.bought.push(other),
        "1 items are in two places, the first is a, with buyer and with other",
    );
}

#[test]
fn a_missing_item_is_reported() {
    finds(
        |stock| stock.unlisted[0].1.clear(),
        "3 items were made, 2 were found",
    );
}

#[test]
fn a_sale_that_never_happened_is_reported() {
    finds(
        |stock| {
            stock.bought[0].1.clear();
            stock.offered.push("a".to_owned());
        },
        "buyers have 0 items and report 1 purchases; 2 items are on the market instead of 1",
    );
}

#[test]
fn a_leaked_lock_is_reported() {
    finds(
        |stock| stock.locks.push("lock:x".to_owned()),
        "1 locks are left, the first is lock:x",
    );
}

#[test]
fn injected_errors_are_found_in_redis() -> anyhow::Result<()> {
    let server = Server::start()?;
    let mut namespace = Namespace::open(&server.url(), "market-test")?;
    let mut connection = namespace.connect()?;
    let keys = Keys::new(namespace.value_key(""));
    let traders = (vec!["seller-1".to_owned()], vec!["buyer-1".to_owned()]);
    // More than one SCAN step returns.
    let count = STEP as u64 * 2 + 1;
    let world = World::found(&mut connection, keys.clone(), traders, count)?;
    let books = world.books(0, 0, 0);
    let locks = namespace.lock_prefix();
    world.take_stock(&mut connection, &locks)?.check(&books)?;

    let plants: [(&[&str], &str); 3] = [
        (
            &["HINCRBY", &keys.user("buyer-1"), "funds", "-7"],
            "7 of money is missing",
        ),
        (
            &["ZREM", &keys.market(), "stock-0.seller-1"],
            "2001 items were made, 2000 were found",
        ),
        (
            &["SET", &namespace.lock_key("market"), "somebody"],
            "1 locks are left",
        ),
    ];
    for (command, words) in plants {
        let mut plant = redis::cmd(command[0]);
        let () = plant.arg(&command[1..]).query(&mut connection)?;
        let found = world.take_stock(&mut connection, &locks)?.check(&books);
        let found = found.err().map(|error| error.to_string());
        assert!(
            found.as_ref().is_some_and(|found| found.contains(words)),
            "{found:?} does not contain {words:?}"
        );
    }
    namespace.clean()
}
