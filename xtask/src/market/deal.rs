//! A deal on the market: what it reads, how it decides, what it writes. The same for every way of
//! keeping others out meanwhile; keeps nobody out itself.

use redis::{ConnectionLike, Pipeline, RedisResult};

use super::world::{Keys, Offer};

pub enum Deal<'a> {
    /// From its seller's inventory to the market.
    List(&'a Offer),
    /// From the market to `buyer`'s inventory, and the price to its seller.
    Buy { offer: &'a Offer, buyer: &'a str },
}

/// What was read makes of a deal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Good,
    /// The item is not, or no longer, where it should be for this, or not at this price.
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

    /// The keys that must not change between reading and writing. As in the article: a buyer watches
    /// the whole market, a sorted set is one key.
    pub fn watched(&self, keys: &Keys) -> Vec<String> {
        match self {
            Deal::List(offer) => vec![keys.inventory(&offer.seller)],
            Deal::Buy { buyer, .. } => vec![keys.market(), keys.user(buyer)],
        }
    }

    /// In one round trip, behind the commands of `before`, whose answers are not looked at.
    pub fn read(
        &self,
        keys: &Keys,
        mut before: Pipeline,
        connection: &mut impl ConnectionLike,
    ) -> RedisResult<Verdict> {
        match self {
            Deal::List(offer) => {
                before
                    .cmd("SISMEMBER")
                    .arg(keys.inventory(&offer.seller))
                    .arg(&offer.item);
                let (there,): (bool,) = before.query(connection)?;
                Ok(if there { Verdict::Good } else { Verdict::Gone })
            }
            Deal::Buy { offer, buyer } => {
                before
                    .cmd("ZSCORE")
                    .arg(keys.market())
                    .arg(offer.member())
                    .cmd("HGET")
                    .arg(keys.user(buyer))
                    .arg("funds");
                let (price, funds): (Option<i64>, i64) = before.query(connection)?;
                Ok(if price != Some(offer.price) {
                    Verdict::Gone
                } else if funds < offer.price {
                    Verdict::TooDear
                } else {
                    Verdict::Good
                })
            }
        }
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
