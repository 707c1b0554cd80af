//! A deal on the market: what it reads, how it decides, and what it writes. A deal is the same for every way of
//! exclusion, and does not exclude others itself.

use redis::{Cmd, ConnectionLike, Pipeline, RedisResult, Value, from_redis_value};

use crate::world::{Keys, Offer};

pub enum Deal<'a> {
    /// Moves an item from its seller's inventory to the market.
    List(&'a Offer),
    /// Moves an item from the market to `buyer`'s inventory, and the price to its seller.
    Buy { offer: &'a Offer, buyer: &'a str },
}

/// The decision of a deal, from the values that it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Good,
    /// The item is not (any longer) in the right place for this deal, or not at this price.
    Gone,
    /// The buyer cannot pay.
    TooDear,
}

impl Deal<'_> {
    pub fn offer(&self) -> &Offer {
        match self {
            Deal::List(offer) | Deal::Buy { offer, .. } => offer,
        }
    }

    /// The keys that must not change between reading and writing. As in the article, a buyer watches the
    /// whole market: a sorted set is one key.
    pub fn watched(&self, keys: &Keys) -> Vec<String> {
        match self {
            Deal::List(offer) => vec![keys.inventory(&offer.seller)],
            Deal::Buy { buyer, .. } => vec![keys.market(), keys.user(buyer)],
        }
    }

    /// Reads all values in one round trip, behind the commands of `before`, whose replies are ignored.
    pub fn read(
        &self,
        keys: &Keys,
        mut before: Pipeline,
        connection: &mut impl ConnectionLike,
    ) -> RedisResult<Verdict> {
        for read in self.reads(keys) {
            before.add_command(read);
        }
        self.judge(before.query(connection)?)
    }

    /// Reads each value in a round trip of its own.
    pub fn read_one_by_one(
        &self,
        keys: &Keys,
        connection: &mut impl ConnectionLike,
    ) -> RedisResult<Verdict> {
        let reads = self.reads(keys).into_iter();
        let answers = reads.map(|read| read.query(connection));
        self.judge(answers.collect::<RedisResult<_>>()?)
    }

    fn reads(&self, keys: &Keys) -> Vec<Cmd> {
        let read = |name: &str, key: String, what: &str| redis::cmd(name).arg(key).arg(what).take();
        match self {
            Deal::List(offer) => {
                vec![read(
                    "SISMEMBER",
                    keys.inventory(&offer.seller),
                    &offer.item,
                )]
            }
            Deal::Buy { offer, buyer } => vec![
                read("ZSCORE", keys.market(), &offer.member()),
                read("HGET", keys.user(buyer), "funds"),
            ],
        }
    }

    fn judge(&self, answers: Vec<Value>) -> RedisResult<Verdict> {
        let answers = Value::Array(answers);
        if let Deal::List(_) = self {
            let (there,): (bool,) = from_redis_value(answers)?;
            return Ok(if there { Verdict::Good } else { Verdict::Gone });
        }
        let (price, funds): (Option<i64>, i64) = from_redis_value(answers)?;
        Ok(if price != Some(self.offer().price) {
            Verdict::Gone
        } else if funds < self.offer().price {
            Verdict::TooDear
        } else {
            Verdict::Good
        })
    }

    pub fn write(&self, keys: &Keys, pipe: &mut Pipeline) {
        let offer = self.offer();
        match self {
            Deal::List(_) => pipe
                .zadd(keys.market(), offer.member(), offer.price)
                .ignore()
                .srem(keys.inventory(&offer.seller), &offer.item)
                .ignore(),
            Deal::Buy { buyer, .. } => pipe
                .hincr(keys.user(&offer.seller), "funds", offer.price)
                .ignore()
                .hincr(keys.user(buyer), "funds", -offer.price)
                .ignore()
                .sadd(keys.inventory(buyer), &offer.item)
                .ignore()
                .zrem(keys.market(), offer.member())
                .ignore(),
        };
    }
}
