//! The messages that scripts publish about one lease of this client. Anybody may publish on the channel: a text
//! that no script writes is no message.

use crate::id::{HolderId, LeaseId};
use crate::key::Key;
use crate::store::command::Grant;
use crate::store::value;

/// `<lease> <what happened> <key>`, as lua/serve.lua, lua/near.lua and lua/release.lua publish it.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) lease: LeaseId,
    pub(super) what: What,
    pub(super) key: Key,
}

#[derive(Debug)]
pub(super) enum What {
    /// The µs part of the token, with `?` before a grant to confirm.
    Granted(Grant),
    /// `~`
    Near,
    /// `!<holder>`
    Forced(HolderId),
}

impl Message {
    pub(super) fn read(prefix: &str, message: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(message).ok()?.splitn(3, ' ');
        Some(Self {
            lease: LeaseId::decode(words.next()?)?,
            what: What::read(words.next()?)?,
            key: Key::of_redis(prefix, words.next()?)?,
        })
    }
}

impl What {
    fn read(text: &str) -> Option<Self> {
        if let Some(by) = text.strip_prefix('!') {
            return HolderId::decode(by).map(Self::Forced);
        }
        if text == "~" {
            return Some(Self::Near);
        }
        let micros = text.strip_prefix('?');
        let token = value::token(micros.unwrap_or(text))?;
        let to_confirm = micros.is_some();
        Some(Self::Granted(Grant { token, to_confirm }))
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fuzz::{self, Bytes};

    fn message() -> impl Strategy<Value = String> {
        let what = prop_oneof![
            Just("~".to_owned()),
            "!host-[a-z]{0,100}/[0-9]{1,7}/[0-9a-f]{8}",
            "\\??179526378094[0-9]{4}",
        ];
        (fuzz::lease(), what, "p:[a-z ]{1,20}")
            .prop_map(|(lease, what, key)| format!("{} {what} {key}", fuzz::lease_text(lease)))
    }

    fn written(message: &Message) -> String {
        let lease = fuzz::lease_text(message.lease);
        let what = match &message.what {
            What::Near => "~".to_owned(),
            What::Forced(by) => format!("!{by}"),
            What::Granted(grant) => {
                let mark = if grant.to_confirm { "?" } else { "" };
                format!("{mark}{}", value::micros_of(grant.token))
            }
        };
        format!("{lease} {what} {}", message.key.in_redis())
    }

    #[test]
    fn what_no_script_publishes_is_no_message() {
        let id = "0".repeat(LeaseId::DIGITS);
        for what in [
            "", "?", "??1", "+1", "01", "~~", "!", "! a", "!a\nb", "!\u{e9}",
        ] {
            let message = format!("{id} {what} p:k");
            let read = Message::read("p:", message.as_bytes());
            assert!(read.is_none(), "{message:?} is {read:?}");
        }
        let other = format!("{id} 1 other:k");
        assert!(Message::read("p:", other.as_bytes()).is_none());
    }

    proptest! {
        #[test]
        fn fuzz_a_message_is_read_as_written(text in message()) {
            let read = Message::read("p:", text.as_bytes());
            prop_assert_eq!(read.as_ref().map(written), Some(text));
        }

        #[test]
        fn fuzz_only_what_scripts_publish_is_a_message(Bytes(bytes) in fuzz::bytes_like(message())) {
            if let Some(read) = Message::read("p:", &bytes) {
                prop_assert_eq!(written(&read), String::from_utf8_lossy(&bytes));
                prop_assert!(read.key.in_redis().starts_with("p:"));
                if let What::Forced(by) = read.what {
                    prop_assert!(by.as_str().len() <= HolderId::MAX_BYTES);
                    prop_assert!(by.as_str().bytes().all(|byte| byte.is_ascii_graphic()));
                }
            }
        }
    }
}
