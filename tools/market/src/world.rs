//! The market's data in Redis, as in the article, and the check of this data at the end: no money was made or lost,
//! each item is in exactly one place, and no lock is left.

use std::collections::HashMap;

use anyhow::bail;
use leasehold_tools::environment::keys_under;
use redis::{Connection, FromRedisValue};
use serde::{Deserialize, Serialize};

/// The funds of a buyer at the start: more than it can spend.
const FUNDS: i64 = 1_000_000_000;
/// Elements read or written at a time: keeps a user's server responsive.
const STEP: usize = 1_000;
const DEAREST: i64 = 100;

/// The names of the keys of one market.
#[derive(Clone, Serialize, Deserialize)]
pub struct Keys(String);

impl Keys {
    pub fn new(prefix: String) -> Keys {
        Keys(prefix)
    }

    /// A sorted set: offers (`item.seller`) by price.
    pub fn market(&self) -> String {
        format!("{}market", self.0)
    }

    /// A set: the items of one trader that are not on the market.
    pub fn inventory(&self, who: &str) -> String {
        format!("{}inventory:{who}", self.0)
    }

    /// A hash: a trader's `funds`.
    pub fn user(&self, who: &str) -> String {
        format!("{}user:{who}", self.0)
    }
}

/// An item for sale, as a buyer has read it.
#[derive(Clone)]
pub struct Offer {
    pub item: String,
    pub seller: String,
    pub price: i64,
}

impl Offer {
    /// A new offer, at any price.
    pub fn new(item: String, seller: &str) -> Offer {
        Offer {
            item,
            seller: seller.to_owned(),
            price: fastrand::i64(1..=DEAREST),
        }
    }

    /// The member of the sorted set.
    pub fn member(&self) -> String {
        format!("{}.{}", self.item, self.seller)
    }

    pub fn from_market(member: &str, price: f64) -> Option<Offer> {
        let (item, seller) = member.rsplit_once('.')?;
        Some(Offer {
            item: item.to_owned(),
            seller: seller.to_owned(),
            // Prices are small whole numbers, which a sorted set keeps exactly.
            price: price as i64,
        })
    }
}

/// The traders, and the number of items at the start.
pub struct World {
    keys: Keys,
    sellers: Vec<String>,
    buyers: Vec<String>,
    /// Items on the market from the start.
    stock: u64,
}

impl World {
    /// Puts `stock` items of the first seller on the market.
    pub fn found(
        connection: &mut Connection,
        keys: Keys,
        (sellers, buyers): (Vec<String>, Vec<String>),
        stock: u64,
    ) -> anyhow::Result<World> {
        for (who, funds) in sellers
            .iter()
            .map(|who| (who, 0))
            .chain(buyers.iter().map(|who| (who, FUNDS)))
        {
            let mut grant = redis::cmd("HSET");
            let () = grant
                .arg(keys.user(who))
                .arg("funds")
                .arg(funds)
                .query(connection)?;
        }
        let numbers: Vec<u64> = (0..stock).collect();
        for some in numbers.chunks(STEP) {
            let mut list = redis::cmd("ZADD");
            list.arg(keys.market());
            for number in some {
                let offer = Offer::new(format!("stock-{number}"), &sellers[0]);
                list.arg(offer.price).arg(offer.member());
            }
            let () = list.query(connection)?;
        }
        Ok(World {
            keys,
            sellers,
            buyers,
            stock,
        })
    }

    /// The totals that the market must have, after the deals that its traders report.
    pub fn books(&self, made: u64, listed: u64, bought: u64) -> Books {
        Books {
            funds: FUNDS * self.buyers.len() as i64,
            items: self.stock + made,
            offered: self.stock + listed - bought,
            bought,
        }
    }

    /// Reads everything; no trade may run meanwhile. `locks` is the library's prefix.
    pub fn take_stock(&self, connection: &mut Connection, locks: &str) -> anyhow::Result<Stock> {
        let mut stock = Stock::default();
        let offers: Vec<(String, f64)> = scan(connection, "ZSCAN", &self.keys.market())?;
        for (member, price) in offers {
            match Offer::from_market(&member, price) {
                Some(offer) => stock.offered.push(offer.item),
                None => bail!("{member:?} is on the market, but is no offer"),
            }
        }
        for who in self.sellers.iter().chain(&self.buyers) {
            let mut ask = redis::cmd("HGET");
            let funds = ask
                .arg(self.keys.user(who))
                .arg("funds")
                .query(connection)?;
            stock.funds.push((who.clone(), funds));
            let items = scan(connection, "SSCAN", &self.keys.inventory(who))?;
            let kept = if self.buyers.contains(who) {
                &mut stock.bought
            } else {
                &mut stock.unlisted
            };
            kept.push((who.clone(), items));
        }
        stock.locks = keys_under(connection, locks)?;
        // The fence counter stays.
        stock.locks.retain(|key| *key != format!("{locks}~fence"));
        Ok(stock)
    }
}

/// The totals that must be found at the end.
pub struct Books {
    funds: i64,
    items: u64,
    offered: u64,
    bought: u64,
}

/// The data that was found at the end.
#[derive(Default)]
pub struct Stock {
    funds: Vec<(String, i64)>,
    offered: Vec<String>,
    /// The items in the inventory of each seller.
    unlisted: Vec<(String, Vec<String>)>,
    /// The items in the inventory of each buyer.
    bought: Vec<(String, Vec<String>)>,
    locks: Vec<String>,
}

impl Stock {
    /// Fails with a list of everything that is wrong.
    pub fn check(&self, books: &Books) -> anyhow::Result<()> {
        let mut wrong = Vec::new();
        let funds: i64 = self.funds.iter().map(|(_, funds)| funds).sum();
        match funds - books.funds {
            0 => {}
            more if more > 0 => wrong.push(format!("{more} of money was made out of nothing")),
            less => wrong.push(format!("{} of money is missing", -less)),
        }
        for (who, funds) in self.funds.iter().filter(|(_, funds)| *funds < 0) {
            wrong.push(format!("{who} spent {} more than it had", -funds));
        }
        let places = self.places(&mut wrong);
        if places != books.items {
            let items = books.items;
            wrong.push(format!("{items} items were made, {places} were found"));
        }
        let bought: usize = self.bought.iter().map(|(_, items)| items.len()).sum();
        let offered = self.offered.len() as u64;
        if (bought as u64, offered) != (books.bought, books.offered) {
            wrong.push(format!(
                "buyers have {bought} items and report {} purchases; {offered} items are on the market \
                instead of {}",
                books.bought, books.offered
            ));
        }
        if let Some(lock) = self.locks.first() {
            let count = self.locks.len();
            wrong.push(format!("{count} locks are left, the first is {lock}"));
        }
        if wrong.is_empty() {
            Ok(())
        } else {
            bail!("the market's books are wrong: {}", wrong.join("; "))
        }
    }

    /// The number of items; items in two places are reported in `wrong`.
    fn places(&self, wrong: &mut Vec<String>) -> u64 {
        let held = self.unlisted.iter().chain(&self.bought);
        let held = held.flat_map(|(who, items)| items.iter().map(move |item| (item, who.as_str())));
        let offered = self.offered.iter().map(|item| (item, "the market"));
        let mut places: HashMap<&str, &str> = HashMap::new();
        let mut twice = Vec::new();
        for (item, place) in held.chain(offered) {
            if let Some(other) = places.insert(item, place) {
                twice.push((item, other, place));
            }
        }
        if let Some((item, place, other)) = twice.first() {
            let count = twice.len();
            wrong.push(format!(
                "{count} items are in two places, the first is {item}, with {place} and with {other}"
            ));
        }
        places.len() as u64
    }
}

/// All elements of a set or sorted set, each once.
fn scan<T: FromRedisValue + PartialOrd>(
    connection: &mut Connection,
    command: &str,
    key: &str,
) -> anyhow::Result<Vec<T>> {
    let (mut cursor, mut elements) = (0_u64, Vec::new());
    loop {
        let some: Vec<T>;
        (cursor, some) = redis::cmd(command)
            .arg(key)
            .arg(cursor)
            .arg("COUNT")
            .arg(STEP)
            .query(connection)?;
        elements.extend(some);
        if cursor == 0 {
            break;
        }
    }
    // SCAN may return an element more than once.
    elements.sort_by(|a, b| a.partial_cmp(b).expect("prices are numbers"));
    elements.dedup();
    Ok(elements)
}

#[cfg(test)]
mod tests;
