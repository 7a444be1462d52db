import unittest

from ledger import Account, Bank, InsufficientFunds, LedgerError, UnknownAccount, monthly, statement
from ledger.statement import largest, show_day


class AccountTest(unittest.TestCase):
    def setUp(self):
        self.account = Account("ann", overdraft=50)
        self.account.deposit(20240105, 300)
        self.account.withdraw(20240110, 320, "rent")

    def test_balance(self):
        self.assertEqual(self.account.balance, -20)

    def test_entries(self):
        self.assertEqual(self.account.entries, [(20240105, 300, "deposit"), (20240110, -320, "rent")])

    def test_available(self):
        self.assertEqual(self.account.available(), 30)

    def test_all_that_is_available_can_go(self):
        self.account.withdraw(20240111, 30)
        self.assertEqual(self.account.balance, -50)

    def test_no_more_than_that(self):
        with self.assertRaisesRegex(InsufficientFunds, "ann lacks 1 cents") as caught:
            self.account.withdraw(20240111, 31)
        self.assertEqual(caught.exception.missing, 1)
        self.assertEqual(self.account.balance, -20)

    def test_amounts_are_positive(self):
        for amount in (0, -5):
            with self.subTest(amount), self.assertRaises(LedgerError):
                self.account.deposit(20240111, amount)
            with self.subTest(amount), self.assertRaises(LedgerError):
                self.account.withdraw(20240111, amount)

    def test_days_do_not_go_back(self):
        with self.assertRaisesRegex(LedgerError, "before the last entry"):
            self.account.deposit(20240109, 10)
        self.account.deposit(20240110, 10)
        self.assertEqual(self.account.balance, -10)

    def test_frozen_accounts_pay_nothing(self):
        self.account.frozen = True
        self.assertEqual(self.account.available(), 0)
        with self.assertRaisesRegex(LedgerError, "frozen"):
            self.account.withdraw(20240111, 1)
        self.account.deposit(20240111, 5)
        self.assertEqual(self.account.balance, -15)

    def test_balance_on(self):
        days = (20240104, 20240105, 20240109, 20240110)
        self.assertEqual([self.account.balance_on(day) for day in days], [0, 300, 300, -20])

    def test_lowest(self):
        self.account.deposit(20240120, 100)
        self.assertEqual(self.account.lowest(), -20)
        self.assertEqual(Account("new").lowest(), 0)


class BankTest(unittest.TestCase):
    def setUp(self):
        self.bank = Bank()
        self.bank.open("ann").deposit(20240101, 1000)
        self.bank.open("bob", overdraft=100)

    def test_transfer(self):
        self.bank.transfer(20240102, "ann", "bob", 400)
        self.assertEqual(self.bank.balances(), {"ann": 600, "bob": 400})
        self.assertEqual(self.bank.account("bob").entries, [(20240102, 400, "from ann")])
        self.assertEqual(self.bank.account("ann").entries[-1], (20240102, -400, "to bob"))

    def test_a_transfer_happens_as_a_whole(self):
        with self.assertRaises(UnknownAccount):
            self.bank.transfer(20240102, "ann", "cy", 400)
        self.assertEqual(self.bank.balances(), {"ann": 1000, "bob": 0})

    def test_a_transfer_needs_funds(self):
        with self.assertRaises(InsufficientFunds):
            self.bank.transfer(20240102, "bob", "ann", 101)
        self.bank.transfer(20240102, "bob", "ann", 100)
        self.assertEqual(self.bank.balances(), {"ann": 1100, "bob": -100})

    def test_no_transfer_to_oneself(self):
        with self.assertRaises(LedgerError):
            self.bank.transfer(20240102, "ann", "ann", 1)

    def test_money_is_neither_made_nor_lost(self):
        self.bank.transfer(20240102, "ann", "bob", 333)
        self.assertEqual(self.bank.total(), 1000)

    def test_names_are_taken_once(self):
        with self.assertRaisesRegex(LedgerError, "ann is taken"):
            self.bank.open("ann")

    def test_close(self):
        self.bank.close("bob")
        self.assertEqual(self.bank.balances(), {"ann": 1000})
        with self.assertRaisesRegex(LedgerError, "not empty"):
            self.bank.close("ann")
        with self.assertRaises(UnknownAccount):
            self.bank.close("bob")

    def test_a_transaction_puts_everything_back(self):
        with self.assertRaises(InsufficientFunds), self.bank.transaction():
            self.bank.account("ann").withdraw(20240102, 600)
            self.bank.account("ann").withdraw(20240102, 600)
        self.assertEqual(self.bank.balances(), {"ann": 1000, "bob": 0})

    def test_a_transaction_that_ends_well_counts(self):
        with self.bank.transaction():
            self.bank.account("ann").withdraw(20240102, 600)
        self.assertEqual(self.bank.account("ann").balance, 400)

    def test_distribute(self):
        self.bank.open("cy")
        self.bank.distribute(20240102, "ann", {"bob": 1, "cy": 2}, 100)
        self.assertEqual(self.bank.balances(), {"ann": 900, "bob": 34, "cy": 66})

    def test_distribute_leaves_out_who_gets_nothing(self):
        self.bank.open("cy")
        self.bank.distribute(20240102, "ann", {"bob": 1, "cy": 0}, 100)
        self.assertEqual(self.bank.account("cy").entries, [])

    def test_distribute_as_a_whole(self):
        with self.assertRaises(UnknownAccount):
            self.bank.distribute(20240102, "ann", {"bob": 1, "dan": 1}, 100)
        self.assertEqual(self.bank.balances(), {"ann": 1000, "bob": 0})

    def test_interest_is_paid_on_what_is_there(self):
        self.bank.account("ann").deposit(20240102, 99000)
        self.bank.account("bob").withdraw(20240102, 50)
        self.assertEqual(self.bank.pay_interest(20241231, 200, 365), 2000)
        self.assertEqual(self.bank.balances(), {"ann": 102000, "bob": -50})
        self.assertEqual(self.bank.account("ann").entries[-1], (20241231, 2000, "interest"))


class StatementTest(unittest.TestCase):
    def setUp(self):
        self.account = Account("ann", overdraft=1000)
        for day, amount in ((20240105, 5000), (20240120, -1250), (20240203, -4000), (20240210, 250)):
            (self.account.deposit if amount > 0 else self.account.withdraw)(day, abs(amount))

    def test_statement(self):
        lines = [
            "opening 50.00",
            "2024-01-20 withdrawal -12.50 37.50",
            "2024-02-03 withdrawal -40.00 -2.50",
            "closing -2.50",
        ]
        self.assertEqual(statement(self.account, 20240106, 20240203), lines)

    def test_an_empty_statement(self):
        self.assertEqual(statement(self.account, 20230101, 20230131), ["opening 0.00", "closing 0.00"])

    def test_days(self):
        self.assertEqual(show_day(20240131), "2024-01-31")
        self.assertEqual(show_day(9991203), "0999-12-03")

    def test_monthly(self):
        self.assertEqual(monthly(self.account), {202401: (5000, 1250), 202402: (250, 4000)})

    def test_largest(self):
        self.assertEqual([amount for _, amount, _ in largest(self.account)], [5000, -4000, -1250])
        self.assertEqual(len(largest(self.account, count=1)), 1)
