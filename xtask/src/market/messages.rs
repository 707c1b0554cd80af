//! What the market and its processes say to each other. No behaviour.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ways::Way;
use super::world::Keys;

/// A seller or a buyer: where it trades, and how.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// The library's prefix.
    pub locks: String,
    pub keys: Keys,
    /// Its name, as in `Keys::inventory`.
    pub who: String,
    pub way: Way,
    pub part: Part,
    pub time: Duration,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum Part {
    /// Makes items and puts them on the market, one after the other.
    Seller,
    Buyer(Buying),
}

/// How a buyer buys.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Buying {
    /// It wants one of this many, the cheapest; without it any item will do.
    pub among: Option<u32>,
    /// How long it works between reading and writing.
    pub length: Duration,
    /// Whether an empty market will fill again; if not, the buyer ends.
    pub restocked: bool,
}

/// To a process, after its assignment.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Go,
}

/// From a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// Connected: waits for `Order::Go`.
    Ready,
    Traded(Tally),
}

/// What one process did.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Items that came into being.
    pub made: u64,
    pub listed: u64,
    pub bought: u64,
    /// Transactions that failed because something had changed, and were tried again.
    pub retries: u64,
    /// Purchases that found the item sold.
    pub late: u64,
    /// From the start to the end of the last deal.
    pub took: Duration,
    /// How long it took to buy, from wanting something to having it: ns, how often.
    pub waits: Vec<(u64, u64)>,
    /// How long the purchase had been tried that was given up when time was over.
    pub unfinished: Option<Duration>,
}
