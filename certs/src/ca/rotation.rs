//! The three steps by which another root takes the place of the one that signs.
//!
//! Each gives back the CA as it is afterwards, and may be made again without harm. Whether everybody who must know has
//! heard of the step before is for whoever makes the next one to find out.

use super::{Ca, CaError, Stage, Step};
use crate::ca::root::Root;

impl Ca {
    /// Where a rotation is: the other root, and what it does.
    pub fn other(&self) -> Option<(Stage, crate::Fingerprint)> {
        let other = self.other.as_ref();
        other.map(|(stage, root)| (*stage, root.fingerprint))
    }

    /// A new root beside the one that signs: trusted, and signing nothing yet.
    pub fn prepare(mut self) -> Result<(Self, Step), CaError> {
        match self.other {
            Some((Stage::Retiring, _)) => Err(CaError::Order(
                "the root of the last rotation is still trusted: end that by `causeway ca rotate retire` first",
            )),
            Some(_) => Ok((self, Step::Standing)),
            None => {
                let mut next = Root::create(self.trust_domain())?;
                next.crossed = Some(self.active.cross(&next)?);
                self.other = Some((Stage::Prepared, next));
                Ok((self, Step::Made))
            }
        }
    }

    /// From now on the new root signs everything; the one before it is trusted still.
    pub fn activate(mut self) -> Result<(Self, Step), CaError> {
        match self.other {
            None => Err(CaError::Order(
                "no root is prepared to take the place of the one that signs: `causeway ca rotate prepare` first",
            )),
            Some((Stage::Prepared, next)) => {
                let before = std::mem::replace(&mut self.active, next);
                self.other = Some((Stage::Retiring, before));
                Ok((self, Step::Made))
            }
            Some(_) => Ok((self, Step::Standing)),
        }
    }

    /// The root before is trusted no more.
    pub fn retire(mut self) -> Result<(Self, Step), CaError> {
        match self.other {
            None => Ok((self, Step::Standing)),
            Some((Stage::Retiring, _)) => {
                self.other = None;
                self.active.crossed = None;
                Ok((self, Step::Made))
            }
            Some(_) => Err(CaError::Order(
                "the prepared root does not sign yet: `causeway ca rotate activate` first",
            )),
        }
    }
}
