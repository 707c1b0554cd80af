//! A load of sellers and buyers, and its runs. Each seller and each buyer is a process, so no two of them share a
//! connection or a client of the lock library. Checks the books of every run.

use std::time::Duration;

use anyhow::{Context as _, bail};
use indicatif::ProgressBar;
use leasehold_load::Waits;
use leasehold_testbed::Process;
use leasehold_tools::environment::Namespace;
use leasehold_tools::progress;
use leasehold_tools::stop::Stop;

use crate::messages::{Assignment, Buying, Message, Order, Part, Tally};
use crate::methods::Way;
use crate::world::{Keys, World};

/// The limit for steps that should take no time.
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// Items on a market without sellers, for each second: more than buyers can buy.
const STOCK_PER_SECOND: f64 = 25_000.0;
const LARGEST_STOCK: f64 = 1_000_000.0;

#[derive(Clone, Copy)]
pub struct Load {
    /// Without sellers, the market is stocked from the start.
    pub sellers: usize,
    pub buyers: usize,
    /// Buyers want one of this many cheapest items. `None`: they want any item.
    pub among: Option<u32>,
    /// How long a buyer works between reading and writing.
    pub length: Duration,
}

/// The work of all processes of a run.
pub struct Run {
    pub way: Way,
    pub listed: u64,
    pub bought: u64,
    pub retries: u64,
    pub late: u64,
    /// How long purchases took, from the wish to buy.
    pub waits: Waits,
    /// The longest time that a buyer spent on a purchase that it abandoned at the end.
    pub unfinished: Option<Duration>,
    /// The time of the slowest process.
    pub took: Duration,
    /// The purchases of the buyer with the fewest, and of the buyer with the most.
    pub shares: (u64, u64),
}

impl Load {
    pub fn name(&self) -> String {
        match self.sellers {
            0 => format!("{} buyers", self.buyers),
            sellers => format!("{sellers}x{}", self.buyers),
        }
    }

    fn name_with(&self, way: Way) -> String {
        format!("{}, {}", self.name(), way.name())
    }

    /// Founds a market, runs the trade for `time`, checks the books, and deletes everything.
    pub fn run(&self, floor: &Floor<'_>, way: Way) -> anyhow::Result<Run> {
        let run = self.run_unnamed(floor, way);
        run.with_context(|| self.name_with(way))
    }

    fn run_unnamed(&self, floor: &Floor<'_>, way: Way) -> anyhow::Result<Run> {
        let namespace = floor.namespace;
        let mut connection = namespace.connect()?;
        let keys = Keys::new(namespace.value_key(""));
        let world = World::found(
            &mut connection,
            keys.clone(),
            self.traders(),
            self.stock(floor.time),
        )?;
        let tallies = self.trade(floor, way, &keys)?;
        let sum = |count: fn(&Tally) -> u64| tallies.iter().map(count).sum();
        let books = world.books(
            sum(|tally| tally.made),
            sum(|tally| tally.listed),
            sum(|tally| tally.bought),
        );
        let stock = world.take_stock(&mut connection, &namespace.lock_prefix())?;
        stock.check(&books)?;
        // The next run uses the same keys.
        namespace.wipe()?;
        self.sum_up(way, &tallies)
    }

    /// The names of the sellers and the buyers. If the market is stocked, its items belong to a seller that does
    /// nothing.
    fn traders(&self) -> (Vec<String>, Vec<String>) {
        let names = |what: &str, count| (1..=count).map(|n| format!("{what}-{n}")).collect();
        (
            names("seller", self.sellers.max(1)),
            names("buyer", self.buyers),
        )
    }

    fn stock(&self, time: Duration) -> u64 {
        if self.sellers > 0 {
            return 0;
        }
        // A buyer cannot make more deals than its work on each deal allows.
        let most = self.buyers as f64 / self.length.as_secs_f64();
        let stock = STOCK_PER_SECOND.min(most) * time.as_secs_f64();
        stock.min(LARGEST_STOCK) as u64
    }

    /// The work of each process, sellers first.
    fn trade(&self, floor: &Floor<'_>, way: Way, keys: &Keys) -> anyhow::Result<Vec<Tally>> {
        let (sellers, buyers) = self.traders();
        let sellers = sellers.into_iter().take(self.sellers);
        let sellers = sellers.map(|who| (who, Part::Seller));
        let buying = Buying {
            among: self.among,
            length: self.length,
            restocked: self.sellers > 0,
        };
        let buyers = buyers.into_iter().map(|who| (who, Part::Buyer(buying)));
        let mut processes = Vec::new();
        for (who, part) in sellers.chain(buyers) {
            floor.stop.check()?;
            let assignment = Assignment {
                url: floor.namespace.url().to_owned(),
                locks: floor.namespace.lock_prefix(),
                keys: keys.clone(),
                who: who.clone(),
                way,
                part,
                time: floor.time,
            };
            processes.push(Process::again(who, &["--process"], &assignment)?);
        }
        for process in &processes {
            match floor.stop.message(process, STEP_LIMIT)? {
                Message::Ready => {}
                other => bail!(process.unexpected("Ready", &other)),
            }
        }
        for process in &mut processes {
            process.order(&Order::Go)?;
        }
        let name = || Ok(self.name_with(way));
        progress::pass(floor.time, floor.bar, floor.stop, name)?;
        let tallies =
            processes
                .iter()
                .map(|process| match floor.stop.message(process, STEP_LIMIT)? {
                    Message::Traded(tally) => Ok(tally),
                    other => Err(process.unexpected("Traded", &other)),
                });
        tallies.collect()
    }

    fn sum_up(&self, way: Way, tallies: &[Tally]) -> anyhow::Result<Run> {
        let buyers = &tallies[self.sellers..];
        let mut waits = Waits::new()?;
        for buyer in buyers {
            waits.add(&buyer.waits)?;
        }
        let sum = |count: fn(&Tally) -> u64| tallies.iter().map(count).sum();
        let bought = || buyers.iter().map(|buyer| buyer.bought);
        Ok(Run {
            way,
            listed: sum(|tally| tally.listed),
            bought: sum(|tally| tally.bought),
            retries: sum(|tally| tally.retries),
            late: sum(|tally| tally.late),
            waits,
            unfinished: buyers.iter().filter_map(|buyer| buyer.unfinished).max(),
            took: tallies
                .iter()
                .map(|tally| tally.took)
                .max()
                .unwrap_or_default(),
            shares: (bought().min().unwrap_or(0), bought().max().unwrap_or(0)),
        })
    }
}

impl Run {
    /// The purchases per second, over the time of the slowest process.
    pub fn per_second(&self) -> f64 {
        self.bought as f64 / self.took.as_secs_f64()
    }
}

/// The conditions of all runs: their server, their length, and how the user stops them.
pub struct Floor<'a> {
    pub namespace: &'a Namespace,
    pub time: Duration,
    pub stop: &'a Stop,
    /// The progress of all runs together, in ms.
    pub bar: &'a ProgressBar,
}
