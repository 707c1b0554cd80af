//! The messages between the market and its processes. Data only.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::methods::Way;
use crate::world::Keys;

/// The place and the task of a seller or a buyer.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// The library's prefix.
    pub locks: String,
    pub keys: Keys,
    /// The name of the trader, as in `Keys::inventory`.
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
    /// The buyer wants one of this many cheapest items. `None`: it wants any item.
    pub among: Option<u32>,
    /// How long the buyer works between reading and writing.
    pub length: Duration,
    /// Whether an empty market will fill again. If not, the buyer ends when the market is empty.
    pub restocked: bool,
}

/// A message to a process, after its assignment.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Go,
}

/// A message from a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// The process has connected, and waits for `Order::Go`.
    Ready,
    Traded(Tally),
}

/// The work of one process.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Items that were made.
    pub made: u64,
    pub listed: u64,
    pub bought: u64,
    /// Transactions that failed because something had changed, and were retried.
    pub retries: u64,
    /// Purchases that found the item sold.
    pub late: u64,
    /// The time from the start to the end of the last deal.
    pub took: Duration,
    /// How often each duration of a purchase occurred, from the wish to buy: (ns, count).
    pub waits: Vec<(u64, u64)>,
    /// The time spent on the purchase that the buyer abandoned at the end.
    pub unfinished: Option<Duration>,
}
