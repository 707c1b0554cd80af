//! Parses the messages that scripts publish about one lease of this client. Other users may publish on the channel,
//! too, so this module ignores any other text. The lease id of a waiter is secret until its grant, and only the message
//! of the grant contains the whole id. So the id proves the grant.

use crate::command::GrantMessage;
use crate::command::value;
use crate::config::key::Key;
use crate::util::id::{HolderId, LeaseId, LeaseStart};

/// A message `<lease> <kind> <key>`, as lua/serve.lua, lua/hint.lua and lua/release.lua publish it.
#[derive(Debug)]
pub struct Message {
    pub kind: MessageKind,
    pub key: Key,
}

#[derive(Debug)]
pub enum MessageKind {
    /// The kind is the µs part of the token. A `?` before it means that the waiter has to confirm the grant.
    Granted(LeaseId, GrantMessage),
    /// The kind is `~`: the lease is near the front of its queue.
    Near(LeaseStart),
    /// The kind is `=`: the lease has to send a request at once, or it loses its place in the queue.
    Called(LeaseStart),
    /// The kind is `!<holder>`: this holder took the key by force.
    Forced(LeaseStart, HolderId),
}

impl Message {
    /// Parses a message. Returns `None` for text that scripts do not publish.
    pub fn parse(prefix: &str, message: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(message).ok()?.splitn(3, ' ');
        Some(Self {
            kind: MessageKind::parse(words.next()?, words.next()?)?,
            key: Key::from_full(prefix, words.next()?)?,
        })
    }
}

impl MessageKind {
    fn parse(lease: &str, text: &str) -> Option<Self> {
        if let Some(by) = text.strip_prefix('!') {
            return Some(Self::Forced(
                LeaseStart::decode(lease)?,
                HolderId::decode(by)?,
            ));
        }
        if text == "~" {
            return LeaseStart::decode(lease).map(Self::Near);
        }
        if text == "=" {
            return LeaseStart::decode(lease).map(Self::Called);
        }
        let micros = text.strip_prefix('?');
        let token = value::token(micros.unwrap_or(text))?;
        let to_confirm = micros.is_some();
        Some(Self::Granted(
            LeaseId::decode(lease)?,
            GrantMessage { token, to_confirm },
        ))
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::util::fuzz;
    use crate::util::fuzz::Bytes;

    fn message() -> impl Strategy<Value = String> {
        let hint = prop_oneof![
            Just("~".to_owned()),
            Just("=".to_owned()),
            "!host-[a-z]{0,100}/[0-9]{1,7}/[0-9a-f]{8}",
        ];
        let hint =
            (fuzz::lease(), hint).prop_map(|(lease, what)| format!("{} {what}", lease.start()));
        let grant = (fuzz::lease(), "\\??179526378094[0-9]{4}")
            .prop_map(|(lease, what)| format!("{} {what}", fuzz::lease_text(lease)));
        (prop_oneof![hint, grant], "p:[a-z ]{1,20}").prop_map(|(what, key)| format!("{what} {key}"))
    }

    fn written(message: &Message) -> String {
        let kind = match &message.kind {
            MessageKind::Near(lease) => format!("{lease} ~"),
            MessageKind::Called(lease) => format!("{lease} ="),
            MessageKind::Forced(lease, by) => format!("{lease} !{by}"),
            MessageKind::Granted(lease, grant) => {
                let mark = if grant.to_confirm { "?" } else { "" };
                let micros = value::micros_of(grant.token);
                format!("{} {mark}{micros}", fuzz::lease_text(*lease))
            }
        };
        format!("{kind} {}", message.key.in_redis())
    }

    #[test]
    fn text_that_no_script_publishes_is_ignored() {
        let id = "0".repeat(LeaseId::DIGITS);
        for what in [
            "", "?", "??1", "+1", "01", "~~", "==", "!", "! a", "!a\nb", "!\u{e9}",
        ] {
            for id in [&*id, &id[..LeaseStart::DIGITS]] {
                let message = format!("{id} {what} p:k");
                let read = Message::parse("p:", message.as_bytes());
                assert!(read.is_none(), "{message:?} is {read:?}");
            }
        }
        // A grant has the whole id, and the other kinds have the first half.
        for (digits, what) in [
            (32, "~"),
            (32, "="),
            (32, "!a"),
            (16, "1"),
            (16, "?1"),
            (31, "1"),
            (17, "~"),
        ] {
            let message = format!("{} {what} p:k", &id[..digits]);
            assert!(
                Message::parse("p:", message.as_bytes()).is_none(),
                "{message}"
            );
        }
        let other = format!("{id} 1 other:k");
        assert!(Message::parse("p:", other.as_bytes()).is_none());
    }

    proptest! {
        #[test]
        fn fuzz_a_message_is_read_as_written(text in message()) {
            let read = Message::parse("p:", text.as_bytes());
            prop_assert_eq!(read.as_ref().map(written), Some(text));
        }

        #[test]
        fn fuzz_only_messages_of_scripts_are_read(Bytes(bytes) in fuzz::bytes_like(message())) {
            if let Some(read) = Message::parse("p:", &bytes) {
                prop_assert_eq!(written(&read), String::from_utf8_lossy(&bytes));
                prop_assert!(read.key.in_redis().starts_with("p:"));
                if let MessageKind::Forced(_, by) = read.kind {
                    prop_assert!(by.as_str().len() <= HolderId::MAX_BYTES);
                    prop_assert!(by.as_str().bytes().all(|byte| byte.is_ascii_graphic()));
                }
            }
        }
    }
}
