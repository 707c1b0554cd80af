//! A process of the market: one seller or one buyer, which trades until time is over. Judges nothing.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use crossbeam_channel::Receiver;
use leasehold_load::Waits;
use leasehold_testbed::child::{self, say};
use leasehold_tools::environment;

use crate::deal::{Deal, Verdict};
use crate::messages::{Assignment, Buying, Message, Order, Part, Tally};
use crate::methods::{Outcome, Trader, pause};
use crate::world::Offer;

/// Items that a seller makes at a time.
const BATCH: u64 = 1_000;
/// The pause before the next look at an empty market.
const EMPTY_PAUSE: Duration = Duration::from_millis(1);
/// How long releases may take at the end.
const SHUTDOWN: Duration = Duration::from_secs(5);

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let Assignment {
        url,
        locks,
        keys,
        who,
        way,
        part,
        time,
    } = assignment;
    let connection = environment::connect(&redis::Client::open(url.as_str())?)?;
    let locks = environment::client(&url, &locks)?;
    let length = match part {
        Part::Seller => Duration::ZERO,
        Part::Buyer(buying) => buying.length,
    };
    say(&Message::Ready)?;
    let Order::Go = orders.recv()?;
    let start = Instant::now();
    let trader = Trader {
        keys,
        connection,
        locks: locks.clone(),
        way,
        length,
        end: start + time,
    };
    let mut dealer = Dealer {
        trader,
        who,
        tally: Tally::default(),
        waits: Waits::new()?,
    };
    match part {
        Part::Seller => dealer.sell()?,
        Part::Buyer(buying) => dealer.buy(buying)?,
    }
    let mut tally = dealer.tally;
    tally.took = start.elapsed();
    tally.waits = dealer.waits.to_steps();
    // The shutdown comes before the report: after all reports, the parent checks that no locks are left.
    locks.shutdown(SHUTDOWN)?;
    say(&Message::Traded(tally))
}

struct Dealer {
    trader: Trader,
    who: String,
    tally: Tally,
    waits: Waits,
}

impl Dealer {
    fn in_time(&self) -> bool {
        Instant::now() < self.trader.end
    }

    fn sell(&mut self) -> anyhow::Result<()> {
        while self.in_time() {
            for item in self.make_items()? {
                if !self.in_time() {
                    break;
                }
                let offer = Offer::new(item, &self.who);
                let Outcome { verdict, retries } = self.trader.make(&Deal::List(&offer))?;
                self.tally.retries += retries;
                if let Some(verdict) = verdict {
                    ensure!(verdict == Verdict::Good, "{} is {verdict:?}", offer.item);
                    self.tally.listed += 1;
                }
            }
        }
        Ok(())
    }

    /// Makes items and puts them into the inventory. Makes many at a time, since this is no part of the comparison.
    fn make_items(&mut self) -> anyhow::Result<Vec<String>> {
        let numbers = self.tally.made..self.tally.made + BATCH;
        let items: Vec<String> = numbers.map(|n| format!("{}-{n}", self.who)).collect();
        let () = redis::cmd("SADD")
            .arg(self.trader.keys.inventory(&self.who))
            .arg(&items)
            .query(&mut self.trader.connection)?;
        self.tally.made += BATCH;
        Ok(items)
    }

    fn buy(&mut self, buying: Buying) -> anyhow::Result<()> {
        let mut wanted = None;
        while self.in_time() {
            let since = *wanted.get_or_insert_with(Instant::now);
            let Some(offer) = self.look(buying.among)? else {
                if !buying.restocked {
                    break;
                }
                // An empty market is no contention, so the wait for new items does not count.
                wanted = None;
                pause(EMPTY_PAUSE.mul_f64(0.5 + fastrand::f64()));
                continue;
            };
            let deal = Deal::Buy {
                offer: &offer,
                buyer: &self.who,
            };
            let Outcome { verdict, retries } = self.trader.make(&deal)?;
            self.tally.retries += retries;
            match verdict {
                Some(Verdict::Good) => {
                    self.tally.bought += 1;
                    self.waits.record(since.elapsed())?;
                    wanted = None;
                }
                Some(Verdict::Gone) => self.tally.late += 1,
                Some(Verdict::TooDear) => wanted = None,
                None => {}
            }
        }
        self.tally.unfinished = wanted.map(|since| since.elapsed());
        Ok(())
    }

    /// An offer that the buyer would take.
    fn look(&mut self, among: Option<u32>) -> anyhow::Result<Option<Offer>> {
        let mut look = redis::cmd(match among {
            Some(_) => "ZRANGE",
            None => "ZRANDMEMBER",
        });
        look.arg(self.trader.keys.market());
        match among {
            Some(cheapest) => look.arg(0).arg(cheapest - 1),
            None => look.arg(1),
        };
        let look = look.arg("WITHSCORES");
        let seen: Vec<(String, f64)> = look.query(&mut self.trader.connection)?;
        if seen.is_empty() {
            return Ok(None);
        }
        let (member, price) = &seen[fastrand::usize(..seen.len())];
        let offer = Offer::from_market(member, *price);
        Ok(Some(offer.with_context(|| {
            format!("{member:?} is on the market, but is no offer")
        })?))
    }
}
